"""The lines of training code that prepare a model as a job has prepared it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prepare.core.utils.wording import as_python

# The letters of an argument list that fits on a line, in half of a page.
_WIDTH = 45


def training_code(
    plan: Mapping[str, Any] | None, amp: str = "none", *, formats: bool = True
) -> str:
    """Return code that loads the recipe and applies it to a `model`, also one in training mode.

    `plan` is the content of `plan.json`. If training with the recipe is an error, the code adds the steps
    that repair it, or prepares the model for inference. `amp` is the autocast of the forward; `formats` says
    that the inputs are formatted also without a step for it, as a run does with its example.
    """
    plan = plan or {}
    errors, repairs = plan.get("training_errors", []), plan.get("training_steps") or {}
    has_format = "input_format" in plan.get("steps", {})
    inputs: dict[str, Any] = {"input_format": {}} if formats and not has_format else {}
    added = {**repairs, **inputs}
    lines = ["import torch"] if amp != "none" else []
    lines += ["from prepare.pipeline import Pipeline", ""]
    if repairs:
        names = " and ".join(repairs)
        lines.append(f"# Without {names}, training mode is an error: see Warnings.")
    elif errors:
        lines.append("# For inference only: training mode is an error, see Warnings.")
    steps = f", steps={as_python(added)}" if added else ""
    arguments = f'"recipe.yaml"{steps}'
    if len(arguments) > _WIDTH:
        arguments = f"\n    {arguments}\n"
    lines.append(f"pipeline = Pipeline.load({arguments})")
    prepared = "model" if repairs or not errors else "model.eval()"
    lines.append(f"model = pipeline.apply({prepared})  # in place, the same object")
    indent = ""
    if amp != "none":
        device = plan.get("steps", {}).get("device", {}).get("device", "cpu").partition(":")[0]
        lines.append(f'with torch.autocast("{device}", torch.{amp}):')
        indent = "    "
    batch = "pipeline.format(batch)" if formats or has_format else "batch"
    lines.append(f"{indent}output = model({batch})")
    return "\n".join(lines)


def recipe_call(path: str, *, repairs: Mapping[str, Mapping[str, Any]] | None, errors: bool) -> str:
    """Return one call that loads the recipe at `path` and applies it, also to a model in training mode.

    `repairs` are the steps that training needs besides, `errors` says that training is an error without.
    """
    steps = f", steps={as_python(repairs)}" if repairs else ""
    prepared = "model" if repairs or not errors else "model.eval()"
    return f'Pipeline.load("{path}"{steps}).apply({prepared})'
