"""Names, shapes and dtypes of a checkpoint beside those of a model."""

import pytest
import torch
from torch import nn

from checkpoint_nets import (
    NOTHING,
    assert_same,
    same_state,
    small,
    small_bytes,
    small_like,
    state_of,
)
from prepare.checkpoint import load, save
from prepare.errors import CheckpointError, ConfigError, KnownIssueError, RefusedError
from prepare.pipeline import Pipeline


def test_missing_and_unexpected_tensors_raise_only_if_strict(path):
    save(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), path)

    def build():
        return nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2, bias=False)})

    with pytest.raises(CheckpointError) as caught:
        load(path, build)
    told = [(p.where.rpartition(", ")[2], p.wrong) for p in caught.value.problems]
    assert told == [
        ("c.weight", "is not in the file"),
        ("b.weight", "has no place in the model"),
        ("b.bias", "has no place in the model"),
    ]
    with pytest.raises(CheckpointError, match=r"c\.weight: is not in the file, and on the meta"):
        load(path, build, strict=False)
    model = build()
    kept = model["c"].weight.detach().clone()
    loaded = load(path, model, strict=False)
    assert loaded.missing == ("c.weight",)
    assert loaded.unexpected == ("b.weight", "b.bias")
    assert torch.equal(model["c"].weight, kept)


def test_rename_maps_names_and_may_leave_some_out(path):
    model = small()
    wrapped = nn.ModuleDict({"module": model, "extra": nn.Linear(2, 2)})
    save(wrapped, path)

    def rename(name):
        return name.removeprefix("module.") if name.startswith("module.") else None

    assert_same(load(path, small, rename=rename).model, small_like(model))
    with pytest.raises(CheckpointError, match="is renamed to 'x', and so is"):
        load(path, small, rename=lambda _: "x")


WRAPPED = {
    "module.": lambda model: nn.ModuleDict({"module": model}),
    "_orig_mod.": lambda model: nn.ModuleDict({"_orig_mod": model}),
    "model.": lambda model: nn.ModuleDict({"model": model, "loss": nn.Linear(2, 2)}),
    "module._orig_mod.": lambda m: nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": m})}),
}


@pytest.mark.parametrize("prefix", WRAPPED)
def test_a_prefix_of_every_name_is_named_and_stripped_on_request(path, prefix):
    model = small()
    save(WRAPPED[prefix](model), path)
    before, built = path.read_bytes(), small()
    with pytest.raises(CheckpointError) as caught:
        load(path, built)
    told = f"{path}: its names hold {prefix!r}, which those of the model lack; load it with strip={prefix!r}"
    assert list(map(str, caught.value.problems)) == [told]
    loaded = load(
        path, built, strip=prefix.removesuffix("."), strict=prefix != "model.", check="always"
    )
    assert_same(loaded.model, small_like(model))
    assert loaded.missing == ()
    assert list(loaded.unexpected) == ["loss.weight", "loss.bias"] * (prefix == "model.")
    assert path.read_bytes() == before


def test_compiled_parts_are_stripped_wherever_they_stand(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save(nn.Sequential(model[0], nn.ModuleDict({"_orig_mod": model[1]})), path)
    with pytest.raises(CheckpointError, match="load it with strip='_orig_mod.'$"):
        load(path, lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    built = load(path, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), strip="_orig_mod.").model
    assert torch.equal(built[1].weight, model[1].weight)


def test_two_prefixes_are_both_named_and_a_part_is_not_one(path):
    save(nn.ModuleDict({"model": nn.Linear(2, 2), "ema": nn.Linear(2, 2)}), path)
    with pytest.raises(CheckpointError, match="hold 'ema.' and 'model.', which .* strip='ema.'$"):
        load(path, nn.Linear(2, 2))
    with pytest.raises(
        ConfigError, match="strip: no name in .* begins with 'modle.'; the first is"
    ):
        load(path, nn.Linear(2, 2), strip="modle.")
    with pytest.raises(CheckpointError, match="a.weight: is not in the file"):
        load(path, nn.ModuleDict({"model": nn.Linear(2, 2), "a": nn.Linear(2, 2)}))


def test_hooks_of_modules_that_rename_are_run(path):
    with pytest.warns(FutureWarning, match="deprecated"):
        old = nn.utils.weight_norm(nn.Conv2d(2, 2, 3))  # its names are weight_g and weight_v
    save(old, path)
    new = load(path, lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3))).model
    image = torch.randn(1, 2, 5, 5)
    assert torch.allclose(new(image), old(image))


class Transposed(nn.Linear):
    def _load_from_state_dict(self, state, prefix, *rest):
        state[prefix + "weight"] = state[prefix + "weight"].t()  # square: no shape would tell
        super()._load_from_state_dict(state, prefix, *rest)
        self.was_loaded = True


class Doubled(nn.Linear):
    """Writes into the tensors of the file."""

    def _load_from_state_dict(self, state, prefix, *rest):
        state[prefix + "weight"].data.mul_(2)
        super()._load_from_state_dict(state, prefix, *rest)


class CopiesItself(nn.Linear):
    def _load_from_state_dict(self, state, prefix, *rest):
        with torch.no_grad():
            self.weight.copy_(state.pop(prefix + "weight"))
            self.bias.copy_(state.pop(prefix + "bias"))


class TakesAnySize(nn.Linear):
    def _load_from_state_dict(self, state, prefix, *rest):
        for name in ("weight", "bias"):
            setattr(self, name, nn.Parameter(torch.zeros_like(state[prefix + name])))
        super()._load_from_state_dict(state, prefix, *rest)


class Turned(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_load_state_dict_pre_hook(Turned.turn)

    def turn(self, state, prefix, *_):
        state[prefix + "weight"] = state[prefix + "weight"].roll(1, 0)


OWN_CODE = [Transposed, Doubled, CopiesItself, TakesAnySize, Turned]


@pytest.mark.parametrize("kind", OWN_CODE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("given", ["function", "model"])
def test_loading_code_of_a_module_does_as_in_torch(path, kind, given):
    def build():
        return nn.Sequential(nn.Linear(3, 3), kind(3, 2 if kind is TakesAnySize else 3))

    stored = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    save(stored, path)
    expected, content = build(), path.read_bytes()
    expected.load_state_dict({name: t.clone() for name, t in stored.state_dict().items()}, False)
    half = Pipeline.from_config({"half": {"dtype": "bfloat16"}})
    loaded = load(path, build if given == "function" else build(), pipeline=half, strict=False)
    assert_same(loaded.model, half.apply(expected))
    assert vars(loaded.model[1]).get("was_loaded") == vars(expected[1]).get("was_loaded")
    assert path.read_bytes() == content


@pytest.mark.parametrize("kind", OWN_CODE, ids=lambda kind: kind.__name__)
def test_loading_code_changes_no_model_that_is_refused(path, kind):
    model = nn.Sequential(kind(3, 3), nn.Linear(3, 3))
    save(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4)), path)
    before = state_of(model)
    with pytest.raises(CheckpointError, match=r"1\.weight: has the shape \[4, 3\]"):
        load(path, model)
    assert same_state(state_of(model), before)
    assert "was_loaded" not in vars(model[0])


def test_a_flipped_bit_is_found_before_loading_code_runs(path):
    save(nn.Linear(3, 3), path)
    content = bytearray(path.read_bytes())
    content[content.index(small_bytes(path, "weight"))] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="weight: is not what was saved: its sha256"):
        load(path, Doubled(3, 3))


def test_key_chooses_an_entry_of_a_file_with_several(tmp_path):
    path = tmp_path / "run.pt"
    model, other = small(), small()
    torch.save({"model": model.state_dict(), "ema": other.state_dict(), "epoch": 2}, path)
    with pytest.raises(CheckpointError, match="choose one: key='model'; there are model, ema"):
        load(path, small)
    assert_same(load(path, small, key="ema").model, small_like(other))
    with pytest.raises(CheckpointError, match="did you mean 'model'"):
        load(path, small, key="modle")
    save(model, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="has no entries, so none called 'model'"):
        load(tmp_path / "w.safetensors", small, key="model")


def test_post_load_hooks_get_the_model_with_its_values(path):
    save(small(), path)
    told = []

    def build():
        model = small()
        model.register_load_state_dict_post_hook(lambda m, keys: told.append((m, *keys)))
        return model

    model = load(path, build).model
    assert told == [(model, [], [])]


def test_names_that_a_post_load_hook_removes_are_not_refused(path):
    save(small(), path)

    def build(*, removed):
        model = small()
        model.register_buffer("extra", torch.ones(2))
        model.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.remove(removed))
        return model

    loaded = load(path, lambda: build(removed="extra"))
    assert loaded.missing == ()
    assert torch.equal(loaded.model.extra, torch.ones(2))
    model = build(removed="extra")
    model.register_buffer("other", torch.ones(2))
    before = state_of(model)
    with pytest.raises(CheckpointError, match="other: is not in the file"):
        load(path, model)
    assert same_state(state_of(model), before)


def test_known_issues_are_errors_unless_they_are_ignored(path):
    def build():
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 3)
        )

    layout = Pipeline.from_config({"device": {"device": "cpu"}, "conv2d_memory_format": {}})
    save(build(), path, pipeline=layout)
    model = build()
    before = state_of(model)
    with pytest.raises(KnownIssueError):
        load(path, model)
    assert same_state(state_of(model), before)
    assert load(path, model, known_issues="ignore").model[0].weight.stride(1) == 1


def test_tied_weights_that_differ_in_the_file_are_an_error(path):
    class Untied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)

    class Tied(Untied):
        def __init__(self):
            super().__init__()
            self.head.weight = self.embedding.weight

    save(Untied(), path)
    for check in ("auto", "never"):
        with pytest.raises(CheckpointError, match=r"is another tensor than embedding\.weight"):
            load(path, Tied, check=check)
    save(Tied(), path)
    both = load(path, Untied).model  # stored once, and both get it
    assert torch.equal(both.embedding.weight, both.head.weight)


def test_every_tensor_of_another_shape_or_dtype_is_named(path):
    save(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), path)
    with pytest.raises(CheckpointError) as caught:
        load(path, lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(5, 6)))
    assert [str(problem) for problem in caught.value.problems] == [
        f"{path}, 1.weight: has the shape [4, 3] in the file, and [6, 5] in the model",
        f"{path}, 1.bias: has the shape [4] in the file, and [6] in the model",
    ]
    model = nn.Linear(2, 2)
    model.register_buffer("count", torch.tensor([1, 2]))
    save(model, path)
    model.count = torch.tensor([1.0, 2.0])
    with pytest.raises(
        CheckpointError, match="count: has the dtype int64 in the file, and float32"
    ):
        load(path, model)


def test_float_dtypes_are_cast_as_model_and_pipeline_require(path):
    exact = small()
    save(
        Pipeline.from_config({"half": {"dtype": "bfloat16", "keep": []}}).apply(small_like(exact)),
        path,
    )
    loaded = load(path, small, pipeline=NOTHING).model
    assert loaded[0].weight.dtype is torch.float32
    assert torch.equal(loaded[0].weight, exact[0].weight.bfloat16().float())
    save(exact, path)
    half = Pipeline.from_config({"half": {"dtype": "float16"}})
    assert torch.equal(load(path, small, pipeline=half).model[0].weight, exact[0].weight.half())
    with torch.no_grad():
        exact[0].weight[1, 0, 0, 0] = 7e4
    save(exact, path)
    with pytest.raises(RefusedError, match=r"0\.weight: 1 of its values would become inf"):
        load(path, small, pipeline=half)
