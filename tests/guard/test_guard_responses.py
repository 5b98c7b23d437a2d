"""Test what a guard does on a difference: raise, warn, save the call, or put torch's own class back."""

import warnings

import pytest
import torch
from torch import nn

from guarded import ALL, STEPS, add, images, network, prepared, train
from prepare.audit import audit
from prepare.core.model.replaced_method import replaced_methods
from prepare.errors import GuardError, GuardWarning
from prepare.pipeline import Pipeline


def test_warn_warns_once_for_each_module():
    pipeline, model = prepared()
    guard = pipeline.guard(model, on_difference="warn")
    add(model[6])
    with torch.no_grad():
        with pytest.warns(GuardWarning, match="6: its outputs"):
            model(images())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(images(20))
    assert [found.module for found in guard.differences] == ["6", "6"]


@pytest.mark.parametrize("training", [False, True])
def test_a_module_that_is_put_back_has_the_numbers_of_torch(training, monkeypatch):
    pipeline, model = prepared(training=training)
    model[3].p = 0.0
    plain = network().train(training)
    plain[3].p = 0.0
    plain.load_state_dict(model.state_dict())
    original, repaired = plain[4].norm, type(model[4].norm)
    forward = repaired.forward
    monkeypatch.setattr(repaired, "forward", lambda self, x: forward(self, x) * 1.1)
    assert pipeline.check(model) == []
    guard = pipeline.guard(model, every=1, share=ALL, on_difference="fallback")
    seen = {}
    model[4].norm.register_forward_hook(lambda m, args, out: seen.update(given=args[0], out=out))

    def run():
        with torch.set_grad_enabled(training):
            first = model(images())
        if training:
            first.mean().backward()
            guard()
            model(images())

    with pytest.warns(GuardWarning, match="runs there in the contiguous format from now on"):
        run()
    assert type(model[4].norm) is nn.InstanceNorm2d
    expected = original(seen["given"].contiguous())
    assert torch.equal(seen["out"], expected)
    assert guard.differences[0].module == "4.norm"
    plan = pipeline.plan(model)
    assert "4.norm" in [name for action in plan.actions for name in action.modules]
    train(model, guard, 1) if training else None
    assert guard.find_drift() == []


def test_a_module_with_rewritten_calls_that_is_put_back_has_its_own():
    pipeline, model = prepared(STEPS | {"keep_layout": {}})
    assert any(replaced_methods(model[4]))
    with torch.no_grad(), pipeline.guard(model, on_difference="fallback") as guard:
        rewritten = vars(model[4])["forward"]
        rewritten.__func__ = lambda self, x: type(self).forward(self, x) * 1.1
        with pytest.warns(GuardWarning, match="its own Block runs there"):
            found = model(images().fill_(0.5))
        assert not any(replaced_methods(model[4]))
        torch.testing.assert_close(found, network().eval()(images().fill_(0.5)))
        assert [each.module for each in guard.differences] == ["4"]


def test_a_compiled_model_that_is_put_back_runs_uncompiled():
    pipeline, model = prepared({"compile": {"backend": "eager"}})
    plain, batch = network().eval(), images()
    guard = pipeline.guard(model, on_difference="fallback")
    compiled = vars(model)["_compiled_call_impl"]
    assert pipeline.check(model) == []
    compiled.compiled = lambda x: plain(x) + 1
    with torch.no_grad(), pytest.warns(GuardWarning, match="it runs uncompiled from now on"):
        assert torch.equal(model(batch), plain(batch))
    assert guard.looks == 1
    with torch.no_grad():
        assert torch.equal(model(batch), plain(batch))
    guard.remove()
    assert not model._forward_pre_hooks


def test_a_convolution_that_is_put_back_is_contiguous_in_the_audit():
    pipeline, model = prepared()
    plan = pipeline.plan(network())
    assert audit(model, plan=plan).summary["convolutions"]["converted"] == 3
    guard = pipeline.guard(model, on_difference="fallback")
    add(model[0])
    with pytest.warns(GuardWarning), torch.no_grad():
        model(images())
    assert audit(model, plan=plan).summary["convolutions"]["converted"] == 2
    batch = images()
    with torch.no_grad():
        assert torch.equal(model[0](batch), network()[0](batch))
    assert guard.find_drift() == []


@pytest.mark.parametrize("training", [False, True])
def test_an_option_that_was_changed_is_put_back_too(training):
    pipeline, model = prepared(training=training)
    with pipeline.guard(model, every=1, share=ALL, on_difference="fallback") as guard:
        model[4].norm.eps = 0.5
        with torch.set_grad_enabled(training), pytest.warns(GuardWarning, match="from now on"):
            train(model, guard, 1) if training else model(images())
        assert model[4].norm.eps == 1e-5
        train(model, guard, 2) if training else model(images(20))
    assert [found.module for found in guard.differences] == ["4.norm"]


@pytest.mark.parametrize("training", [False, True])
def test_a_difference_that_stays_with_the_class_of_torch_raises(training):
    pipeline, model = prepared(training=training)
    with pipeline.guard(model, every=1, share=ALL, on_difference="fallback") as guard:
        model[4].norm.register_forward_hook(lambda _m, args, out: out * 1.1)
        stays = pytest.raises(GuardError, match="also with torch's own class put back")
        with (
            stays,
            torch.set_grad_enabled(training),
            pytest.warns(GuardWarning, match="from now on"),
        ):
            train(model, guard, 2) if training else model(images())


def test_a_weight_in_training_is_put_back_only_with_its_optimizer():
    pipeline, model = prepared(training=True)
    with pipeline.guard(model, every=1, share=ALL, on_difference="fallback") as guard:
        add(model[0])
        with pytest.raises(GuardError, match="cannot be put back: its weights would change"):
            train(model, guard, 1)
    del model[0].forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pipeline.guard(
        model, every=1, share=ALL, on_difference="fallback", optimizer=optimizer
    ) as guard:
        add(model[0])
        model(images()).mean().backward()
        optimizer.step()
        with pytest.warns(GuardWarning, match="from now on"):
            guard()
    state = optimizer.state[model[0].weight]["momentum_buffer"]
    assert state.is_contiguous()
    assert model[0].weight.is_contiguous()


@pytest.mark.parametrize("training", [False, True])
def test_torch_loads_the_call_that_differed(training, tmp_path):
    pipeline, model = prepared({"conv2d_memory_format": {}}, training=training)
    guard = pipeline.guard(
        model, every=1, share=ALL, on_difference="warn", folder=tmp_path / "guard"
    )
    add(model[6], 0.5)
    with guard, pytest.warns(GuardWarning, match=r"torch.load reads that call from .*guard-6\.pt"):
        train(model, guard, 1) if training else model(images())
    assert (tmp_path / "guard" / "guard.log").read_text() == f"{guard.differences[0]}\n"
    saved = torch.load(tmp_path / "guard" / "guard-6.pt", weights_only=False)
    assert (saved["module"], saved["training"]) == ("6", training)
    own = type(model[6])(model[6].in_channels, model[6].out_channels, model[6].kernel_size)
    own.load_state_dict(saved["weights"])
    right = own(*saved["args"], **saved["kwargs"])
    torch.testing.assert_close(model[6](*saved["args"], **saved["kwargs"]), right + 0.5)
    assert bool(saved["output_gradients"]) == training


def test_a_call_that_cannot_be_saved_is_told_without_a_file(tmp_path, monkeypatch):
    def refuse(*_):
        raise TypeError("cannot pickle this")

    pipeline, model = prepared({"conv2d_memory_format": {}})
    monkeypatch.setattr(torch, "save", refuse)
    guard = pipeline.guard(model, on_difference="warn", folder=tmp_path)
    add(model[6])
    with guard, torch.no_grad(), pytest.warns(GuardWarning) as said:
        model(images())
    assert "torch.load" not in str(said[0].message)
    assert [path.name for path in tmp_path.iterdir()] == ["guard.log"]


@pytest.mark.slow
def test_a_fault_of_torch_itself_is_found_and_saved(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3))
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}, "input_format": {"attach": True}})
    pipeline.apply(model, known_issues="ignore")
    with pipeline.guard(model, every=1, share=ALL, on_difference="warn", folder=tmp_path) as guard:
        train(model, guard, 2)
        assert guard.differences == []
        with pytest.warns(GuardWarning, match=r"1: its gradients are off by .*guard-1\.pt"):
            train(model, guard, 1, images(12, samples=1))
    saved = torch.load(tmp_path / "guard-1.pt", weights_only=False)
    assert saved["args"][0].is_contiguous(memory_format=torch.channels_last)
