"""The patches for timm: the same results, and fewer breaks. Where timm is not installed, they are skipped."""

import importlib
import inspect
import re
import types
from pathlib import Path

import pytest
import torch

from prepare.stages.flow import predict

PAGE = (Path(__file__).parents[2] / "docs" / "upstream" / "timm.md").read_text()
CASES = {
    "timm.models.cait": ("TalkingHeadAttn", {"dim": 16, "num_heads": 2}, (2, 9, 16), ()),
    "timm.models.mvitv2": (
        "MultiScaleAttention",
        {
            "dim": 16,
            "dim_out": 16,
            "feat_size": (4, 4),
            "num_heads": 2,
            "has_cls_token": False,
            "kernel_q": (3, 3),
            "kernel_kv": (3, 3),
        },
        (2, 16, 16),
        ([4, 4],),
    ),
    "timm.layers.halo_attn": (
        "HaloAttn",
        {"dim": 16, "num_heads": 2, "block_size": 4, "halo_size": 1},
        (2, 16, 8, 8),
        (),
    ),
}


def patched(module):
    """Return the module with the patches of its section of the page."""
    source = inspect.getsource(module).split("\n@register_model")[0]
    section = PAGE.split(f"`{module.__name__.replace('.', '/')}.py`")[1].split("\n## ")[0]
    for block in re.findall(r"```diff\n(.*?)```", section, re.DOTALL):
        old, new = (
            "".join(f"{line[1:]}\n" for line in block.splitlines() if line[0] == sign)
            for sign in "-+"
        )
        assert old in source
        source = source.replace(old, new)
    found = types.ModuleType(module.__name__)
    found.__package__, found.__file__ = module.__package__, module.__file__
    exec(compile(source, "patched", "exec"), vars(found))
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_patch_gives_the_same_and_loses_less(name, monkeypatch):
    pytest.importorskip("timm")
    module = importlib.import_module(name)
    kind, options, shape, more = CASES[name]
    torch.manual_seed(0)
    theirs = getattr(module, kind)(**options)
    ours = getattr(patched(module), kind)(**options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(shape)
    results, breaks = [], []
    for model in (theirs, ours):
        model.to(memory_format=torch.channels_last)
        given = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.clone()
        given.requires_grad_()
        output = model(given, *more)
        output = output[0] if isinstance(output, tuple) else output
        results.append(
            [output, *torch.autograd.grad(output.square().sum(), [given, *model.parameters()])]
        )
        flow = predict(model, (given.detach(), *more), wanted={4: "channels_last"})
        breaks.append((flow.summary["breaks"], flow.summary["copied_bytes"]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert breaks[1] < breaks[0]
