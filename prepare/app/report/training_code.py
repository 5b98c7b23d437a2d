"""Write code to paste that prepares and calls a model as a run has, in some lines or in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prepare.core.utils.wording import as_python

_INDENT = "    "


def training_code(
    plan: Mapping[str, Any] | None,
    amp: str = "none",
    *,
    method: str = "",
    waiting: str = "",
    training: bool = False,
) -> str:
    """Return code that loads the recipe, applies it to a `model` as the run has, and calls it.

    `plan` is the content of `plan.json`. If training with the recipe is an error, the code prepares the model
    for inference, and names the steps that training needs. `amp` is the autocast of the forward; `method` is
    called in place of the model itself; it was timed with the variables `waiting` in the environment. Code
    for `training` has the loop with the optimizer, and scales the gradients of float16.
    """
    plan = plan or {}
    errors, repairs = plan.get("training_errors", []), plan.get("training_steps") or {}
    lines = [f"# Timed with {waiting}: set it for your program too."] if waiting else []
    lines += ["import torch"] if amp != "none" else []
    lines += ["from prepare.pipeline import Pipeline", ""]
    if repairs:
        load = f'Pipeline.load("recipe.yaml", steps={as_python(repairs)})'
        lines.append(f"# This recipe is for inference. To train, use {load}.")
    elif errors:
        lines.append("# For inference only: training mode is an error, see Warnings.")
    lines.append('pipeline = Pipeline.load("recipe.yaml")')
    given = ", optimizer=optimizer" if training else ""
    lines.append(f"model = pipeline.apply({_model(errors)}{given})  # in place, the same object")
    device = plan.get("steps", {}).get("device", {}).get("device", "cpu").partition(":")[0]
    call = _call(method)
    work = [f"loss = criterion({call}, target)"] if training else [f"output = {call}"]
    if amp != "none":
        work = [f'with torch.autocast("{device}", torch.{amp}):', *(f"{_INDENT}{x}" for x in work)]
    if not training:
        return "\n".join([*lines, *work])
    backward = ["loss.backward()", "optimizer.step()"]
    if amp == "float16":
        lines.append(f'scaler = torch.amp.GradScaler("{device}")')
        backward = ["scaler.scale(loss).backward()", "scaler.step(optimizer)", "scaler.update()"]
    loop = ["optimizer.zero_grad()", *work, *backward]
    lines += ["for batch, target in loader:", *(f"{_INDENT}{each}" for each in loop)]
    return "\n".join(lines)


def one_line(
    path: str,
    plan: Mapping[str, Any],
    *,
    method: str = "",
    formats: bool = False,
    training: bool = False,
) -> str:
    """Return one line that loads the recipe at `path` and applies it, as `training_code` does.

    It ends with a call if that is not `model(batch)`: with `formats` a batch has to be formatted.
    """
    prepared = _model(plan.get("training_errors")) + (", optimizer=optimizer" if training else "")
    load = f'Pipeline.load("{path}")'
    if not (method or formats):
        return f"{load}.apply({prepared})"
    return f"pipeline = {load}; pipeline.apply({prepared}); {_call(method)}"


def _model(errors: Any) -> str:
    """Return the model as `apply` takes it, if training with the recipe has these errors."""
    return "model.eval()" if errors else "model"


def _call(method: str) -> str:
    return f"model{'.' if method else ''}{method}(pipeline.format(batch))"
