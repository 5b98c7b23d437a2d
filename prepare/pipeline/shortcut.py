"""Prepare a model in one call: `prepare.prepare`."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from prepare.core.forward.call import call_of
from prepare.core.model.known_issues import REPAIR_STEP
from prepare.core.utils.options import plain
from prepare.core.utils.suggest import choose, meant
from prepare.errors import ConfigError
from prepare.pipeline import Pipeline, Plan
from prepare.pipeline.known_issue_checks import KnownIssues

_Model = TypeVar("_Model", bound=nn.Module)
_2D = {"conv2d_memory_format": "channels_last"}
_3D = {"conv3d_memory_format": "channels_last_3d"}
# The steps and their memory formats for each word.
_FORMATS = {
    "channels_last": _2D,
    "channels_last_3d": _3D,
    "by_rank": _2D | _3D,
    "contiguous": dict.fromkeys(_2D | _3D, "contiguous"),
}
_DTYPES = {"float32": None, "float16": "float16", "bfloat16": "bfloat16"}


# What `prepare` was to change in each model, for `report`; an entry goes with its model.
PLANS: WeakKeyDictionary[nn.Module, Plan] = WeakKeyDictionary()


def prepare(
    model: _Model,
    memory_format: torch.memory_format | str | Any = None,
    *,
    example: Any = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    repair_layout: bool | None = None,
    format_inputs: bool = True,
    known_issues: KnownIssues = "error",
) -> _Model:
    """Prepare `model` in place and return it: the pipeline of these options, built and applied.

    Args:
        model: in training or evaluation mode; the same object with the same Parameters is returned.
        memory_format: of the weights of convolutions: `channels_last` (2-d), `channels_last_3d`, `by_rank`
            (both) or `contiguous`; also torch's objects. A batch in its place is the `example`.
        example: a batch, as before `format`. `rewrite_conv` times the convolutions with it, and runs those
            as other operations that are faster so.
        dtype: `float16` or `bfloat16`; batch and instance norms are kept. `float32` changes nothing.
        device: `cpu`, `cuda`, `mps` or `auto`; also torch's object.
        optimizer: one or several; their state is moved along with the parameters.
        repair_layout: replace kernels that lose the layout, or compute wrong gradients in it; by default
            if a channels-last format is asked for.
        format_inputs: install a hook that formats the inputs of the model.
        known_issues: as in `Pipeline.apply`.

    `Pipeline.from_config` has more options, and `Pipeline.save` writes a recipe.

    Raises:
        ConfigError: an option is wrong, or has no effect on this model.
        RefusedError: the model cannot be prepared in its present state.
    """
    steps: dict[str, Any] = {}
    if example is None and call_of(memory_format).tensors():
        memory_format, example = None, memory_format
    if device is not None:
        steps["device"] = {"device": plain(device)}
    if dtype is not None and (name := _chosen("dtype", dtype, _DTYPES)):
        steps["half"] = {"dtype": name}
    if memory_format is not None:
        formats = _chosen("memory_format", memory_format, _FORMATS)
        steps |= {step: {"memory_format": name} for step, name in formats.items()}
        if repair_layout is None:
            repair_layout = formats != _FORMATS["contiguous"]
    if repair_layout:
        steps[REPAIR_STEP] = {}
    if steps and format_inputs:
        steps["input_format"] = {"attach": True}
    if example is not None:
        steps["rewrite_conv"] = {}
    if not steps:
        allowed = "give memory_format, dtype, device or example"
        raise ConfigError("prepare", "nothing is asked for", allowed)
    pipeline = Pipeline.from_config(steps)
    if example is not None:
        pipeline.choose(model, example)
        if pipeline.asking():
            example = None  # it cannot be called, as a warning has said
    plan = pipeline.plan(model, known_issues="ignore")
    pipeline.apply(model, optimizer=optimizer, known_issues=known_issues, example=example)
    PLANS[model] = plan
    return model


def _chosen(key: str, value: Any, allowed: Mapping[str, Any]) -> Any:
    name = meant(value, allowed)
    if name is None:
        word = str(plain(value))
        raise ConfigError(key, f"{word!r} is not allowed", choose(word, allowed))
    return allowed[name]
