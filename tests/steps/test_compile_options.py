"""Options of the step compile: what reaches torch, and what is refused."""

import pytest
import torch

from compile_checks import Net, pipeline
from prepare.app.job.settings import read_settings
from prepare.errors import ConfigError, RefusedError
from prepare.pipeline import Pipeline


def test_every_option_reaches_torch(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda call, **keywords: seen.append(keywords) or call)
    Pipeline.from_config(
        {"compile": {"dynamic": True, "fullgraph": True, "mode": "max-autotune"}}
    ).apply(Net())
    assert seen[-1] == {
        "backend": "inductor", "dynamic": True, "fullgraph": True, "mode": "max-autotune", "options": None,
    }  # fmt: skip
    options = {
        "mode": "max-autotune-no-cudagraphs",
        "options": {"cpp.threads": 1},
        "freezing": True,
    }
    Pipeline.from_config({"compile": options}).apply(Net().eval())
    assert seen[-1]["mode"] is None
    assert (
        seen[-1]["options"].items()
        >= {"max_autotune": True, "cpp.threads": 1, "freezing": True}.items()
    )


@pytest.mark.parametrize(
    ("options", "where", "said"),
    [
        ({"backend": "inductr"}, "backend", "did you mean 'inductor'?"),
        ({"backend": ""}, "backend", "is not a backend"),
        ({"freezing": True}, "freezing", "is for inductor"),
        ({"mode": "default"}, "mode", "is for inductor"),
    ],
)
def test_wrong_compile_options_are_configuration_errors(options, where, said):
    with pytest.raises(ConfigError, match=rf"^steps\.compile\.{where}: ") as caught:
        pipeline(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "where", "said"),
    [
        ({"backend": "of_a_plugin"}, "backend", "is not a backend"),
        ({"backend": "inductor", "options": {"max_autotun": True}}, "options", "max_autotun"),
        ({"backend": "inductor", "options": {"max_autotune": 3}}, "options", "bool"),
        ({"backend": "inductor", "freezing": True}, "freezing", "model.eval()"),
    ],
)
def test_options_that_torch_rejects_are_refused_before_any_change(options, where, said):
    net = Net()
    with pytest.raises(RefusedError, match=rf"^steps\.compile\.{where}: ") as caught:
        pipeline(**options).apply(net)
    assert said in str(caught.value)
    assert net._compiled_call_impl is None


def test_only_inductor_reports_a_missing_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    message = r"backend: inductor needs a C\+\+ compiler \(no-such-compiler\), which is not installed; install it"
    with pytest.raises(RefusedError, match=message):
        pipeline(backend="inductor").apply(Net())
    pipeline().apply(Net())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"freezing": True},
            "steps.compile.freezing: turns the weights.*mode=eval.* or steps.compile.freezing=false",
        ),
        ({"options": {"freezing": True}}, "steps.compile.freezing: turns the weights"),
    ],
)
def test_freezing_is_an_error_in_training(options, message):
    config = {"model": {"_target_": "torch.nn.Identity"}, "steps": {"compile": options}}
    with pytest.raises(ConfigError, match=f"^{message}"):
        read_settings({**config, "mode": "train"}, choices={})
    read_settings({**config, "mode": "eval"}, choices={})
