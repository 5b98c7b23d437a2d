"""The step keep_layout: it rewrites the calls of a model's own code, and can be undone."""

import copy
import functools
import importlib.util
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from keeping_nets import CausalConv, Chunked, Decorated, Purposeful, chunked, folding, image, video
from prepare.core.model.module_tree import copy_tree
from prepare.errors import ConfigError
from prepare.pipeline import Pipeline
from prepare.stages.flow import observe, predict
from prepare.steps import keep_layout
from prepare.steps.keeping.calls import find_calls, replace_calls, replaced_calls

PAD = "CausalConv.forward: F.pad(x, (1, 1, 1, 1, 2 if last is None else 1, 0))"
CAT = "CausalConv.forward: torch.cat([last, x], dim=2)"


def kept(model: nn.Module, **options) -> nn.Module:
    return Pipeline.from_config({"keep_layout": options}).apply(model, known_issues="ignore")


def breaks(model: nn.Module, follow=predict) -> int:
    return follow(model, video()).summary["breaks"]


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    output = model(x)
    return [output, *torch.autograd.grad(output.square().sum(), [x, *model.parameters()])]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for first, second in zip(one, other, strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("follow", [predict, observe])
def test_a_model_with_breaks_in_its_own_code_has_none(follow):
    assert breaks(chunked(), follow) > 0
    assert breaks(kept(chunked()), follow) == 0


@pytest.mark.parametrize("batch", [1, 2])
def test_outputs_and_gradients_stay_the_same(batch):
    assert_equal(gradients(kept(chunked()), video(batch)), gradients(chunked(), video(batch)))


def test_a_module_stays_itself_and_can_be_undone():
    model = chunked()
    called = []
    model.conv.register_forward_hook(lambda *_: called.append(1))
    state, classes = model.state_dict(), [type(module) for module in model.modules()]
    modules = list(model.modules())
    assert kept(model) is model
    assert list(model.modules()) == modules
    assert [type(module) for module in model.modules()] == classes
    assert replaced_calls(model)
    assert model.state_dict().keys() == state.keys()
    model(video())
    assert len(called) == 2
    keep_layout.undo(model)
    assert not any(replaced_calls(module) for module in model.modules())
    assert "forward" not in vars(model)


def test_a_model_can_be_pickled_and_copied_at_every_protocol():
    model = kept(chunked())
    expected = model(video())
    copies = [pickle.loads(pickle.dumps(model, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in (*copies, copy.deepcopy(model), copy.copy(model), copy_tree(model)):
        assert replaced_calls(other) == replaced_calls(model)
        assert replaced_calls(other.conv) == replaced_calls(model.conv)
        assert torch.equal(other(video()), expected)


def test_only_the_named_calls_are_replaced():
    model = kept(chunked(), calls=[PAD])
    assert replaced_calls(model.conv) == (PAD,)
    assert not replaced_calls(model)
    again = kept(model, calls=[CAT])
    assert set(replaced_calls(again.conv)) == {PAD, CAT}


def test_a_call_that_is_not_in_the_code_is_an_error():
    with pytest.raises(ConfigError, match="is not a call in the code of Chunked; did you mean"):
        kept(chunked(), calls=[PAD.replace("last is None", "last")])
    with pytest.raises(ConfigError, match="write auto, which finds them"):
        kept(chunked(), calls=["?"])


def test_a_contiguous_on_purpose_is_not_touched():
    torch.manual_seed(0)
    model = Purposeful().to(memory_format=torch.channels_last_3d)
    expected = model(video())
    assert torch.equal(kept(model)(video()), expected)
    assert not replaced_calls(model)


def test_a_method_that_is_decorated_or_overridden_is_not_replaced():
    assert not find_calls(Decorated)
    model = Decorated(3, 8, 3).to(memory_format=torch.channels_last_3d)
    assert not Pipeline.from_config({"keep_layout": {}}).plan(model)


def closing_over(factor):
    class Closing(nn.Module):
        def forward(self, x, *, plus=1.0, pad=(1, 1)):
            return [nn.functional.pad(item, pad) * factor + plus for item in (x, x)]

    return Closing


def test_closures_and_defaults_of_a_method_stay():
    cls = closing_over(3.0)
    made = cls()
    replace_calls(made, [call.name for call in find_calls(cls)])
    assert replaced_calls(made)
    x = video()
    assert torch.equal(made(x, plus=2.0)[1], cls()(x, plus=2.0)[1])
    assert torch.equal(made(x)[0], cls()(x)[0])
    assert inspect.signature(made.forward) == inspect.signature(cls().forward)


def test_an_error_names_the_line_of_the_model():
    with pytest.raises(RuntimeError) as caught:
        kept(chunked()).conv(video(), video(1))
    lines = [(entry.path.name, entry.lineno + 1) for entry in caught.traceback]
    first = CausalConv.forward.__code__.co_firstlineno
    assert ("keeping_nets.py", first + 2) in lines


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_runs_under_autocast_and_checkpointing(reentrant):
    def outputs(model):
        with torch.autocast("cpu", torch.bfloat16):
            low = model(video())
        x = video().requires_grad_()
        high = checkpoint(model, x, use_reentrant=reentrant)
        high.sum().backward()
        return [low, high, x.grad, *(parameter.grad for parameter in model.parameters())]

    assert_equal(outputs(kept(chunked())), outputs(chunked()))


def test_dynamo_traces_it_without_a_graph_break():
    model = kept(chunked())
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(video()), model(video()))


def test_pixels_folded_into_channels_stay_in_channels_last():
    named = [call.name for module in folding().modules() for call in find_calls(type(module))]
    model = kept(folding(), calls=named)
    assert predict(folding(), image()).summary["breaks"] > 0
    assert predict(model, image()).summary["breaks"] == 0
    assert_equal(gradients(model, image()), gradients(folding(), image()))


def test_an_example_chooses_the_calls_as_a_run_does(tmp_path):
    formats = {"conv3d_memory_format": {}, "input_format": {}, "keep_layout": {}}
    pipeline, batch = Pipeline.from_config(formats), torch.randn(2, 3, 2, 6, 7)
    model = pipeline.apply(Chunked().eval(), example=batch)
    chosen = pipeline.steps["keep_layout"].calls
    assert len(chosen) == 2
    assert set(replaced_calls(model.conv)) == set(chosen)
    assert not replaced_calls(model)  # its cat loses nothing
    assert predict(model, pipeline.format(batch)).summary["breaks"] == 0
    assert pipeline.check(model) == []
    pipeline.save(tmp_path / "recipe.yaml")
    assert Pipeline.load(tmp_path / "recipe.yaml").steps["keep_layout"].calls == chosen
    everything = Pipeline.from_config(formats).apply(Chunked().eval())
    assert replaced_calls(everything)


class Dense(nn.Sequential):
    """Names its own class, as old code does."""

    def __init__(self):
        super(Dense, self).__init__(  # noqa: UP008
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()
        )

    def forward(self, x):
        return torch.cat([x, super(Dense, self).forward(x)], 1)  # noqa: UP008


def test_a_method_may_name_its_own_class():
    model, x = Dense().eval(), image()
    expected = model(x)
    Pipeline.from_config({"conv2d_memory_format": {}, "keep_layout": {}}).apply(model)
    assert replaced_calls(model)
    torch.testing.assert_close(model(x), expected)


EDITED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        x = self.conv(x)
        return torch.cat([x, {}], 1)
"""


def edited(folder, then):
    """Return a model whose file is written anew after it was loaded."""
    (file := folder / "edited_net.py").write_text(EDITED.format("x"))
    spec = importlib.util.spec_from_file_location("edited_net", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    file.write_text(then)
    return module.Net().eval()


@pytest.mark.parametrize(
    "then", [EDITED.format("x * 100"), "\n" + EDITED.format("x"), "", "class :"]
)
def test_a_file_that_was_edited_is_not_read(tmp_path, then):
    model, x = edited(tmp_path, then), image()
    expected = model(x)
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}, "keep_layout": {}})
    pipeline.apply(model)
    assert not replaced_calls(model)
    torch.testing.assert_close(model(x), expected)


def hook(module):
    """Replace the forward of an object, as accelerate's hooks do."""
    module._old_forward = module.forward

    def new_forward(module, *args, **kwargs):
        return module._old_forward(*args, **kwargs)

    made = functools.partial(new_forward, module)
    module.forward = functools.update_wrapper(made, module._old_forward)


def test_a_forward_on_the_object_is_left_alone():
    model = chunked()
    hook(model)
    pipeline = Pipeline.from_config({"keep_layout": {}})
    said = [str(warning) for warning in pipeline.plan(model, known_issues="ignore").warnings]
    assert [text for text in said if "another one lies on the object" in text] == said
    assert len(said) == 1
    kept(model)
    assert not replaced_calls(model)
    assert replaced_calls(model.conv)
    assert torch.equal(model(video()), chunked()(video()))


class Repeats(nn.Module):
    """Returns what an operator does."""

    def forward(self, x):
        return x.repeat(1, 2, 1, 1)


@pytest.mark.parametrize("grad", [False, True])
def test_results_may_be_changed_in_place(grad):
    model, x = Repeats(), image().requires_grad_(grad)
    replace_calls(model, [call.name for call in find_calls(Repeats)])
    found = model(x)
    assert found.stride()[1] == 1
    with torch.no_grad():
        frozen = model(x)
    frozen += found
    torch.testing.assert_close(frozen, 2 * x.repeat(1, 2, 1, 1))
    assert not found.detach_().requires_grad
