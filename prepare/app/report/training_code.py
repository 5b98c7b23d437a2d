"""Write code to paste that prepares and calls a model as a run has, in some lines or in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.core.utils.wording import as_python

if TYPE_CHECKING:
    from collections.abc import Mapping

# The letters of an argument list that fits on a line, in half of a page.
_WIDTH = 45


def training_code(
    plan: Mapping[str, Any] | None, amp: str = "none", *, method: str = "", waiting: str = ""
) -> str:
    """Return code that loads the recipe, applies it to a `model`, also one in training mode, and calls it.

    `plan` is the content of `plan.json`. If training with the recipe is an error, the code adds the steps
    that repair it, or prepares the model for inference. `amp` is the autocast of the forward; `method` is
    called in place of the model itself; it was timed with the variables `waiting` in the environment.
    """
    plan = plan or {}
    errors, repairs = plan.get("training_errors", []), plan.get("training_steps") or {}
    lines = [f"# Timed with {waiting}: set it for your program too."] if waiting else []
    lines += ["import torch"] if amp != "none" else []
    lines += ["from prepare.pipeline import Pipeline", ""]
    if repairs:
        names = " and ".join(repairs)
        lines.append(f"# Without {names}, training mode is an error: see Warnings.")
    elif errors:
        lines.append("# For inference only: training mode is an error, see Warnings.")
    load, prepared = _load_and_model("recipe.yaml", repairs, errors=bool(errors), width=_WIDTH)
    lines.append(f"pipeline = {load}")
    lines.append(f"model = pipeline.apply({prepared})  # in place, the same object")
    indent = ""
    if amp != "none":
        device = plan.get("steps", {}).get("device", {}).get("device", "cpu").partition(":")[0]
        lines.append(f'with torch.autocast("{device}", torch.{amp}):')
        indent = "    "
    lines.append(f"{indent}output = {_call(method)}")
    return "\n".join(lines)


def one_line(path: str, plan: Mapping[str, Any], *, method: str = "", formats: bool = False) -> str:
    """Return one line that loads the recipe at `path` and applies it, as `training_code` does.

    It ends with a call if that is not `model(batch)`: with `formats` a batch has to be formatted.
    """
    repairs, errors = plan.get("training_steps") or {}, bool(plan.get("training_errors"))
    load, prepared = _load_and_model(path, repairs, errors=errors)
    if not (method or formats):
        return f"{load}.apply({prepared})"
    return f"pipeline = {load}; pipeline.apply({prepared}); {_call(method)}"


def _load_and_model(
    path: str, repairs: Mapping[str, Any], *, errors: bool, width: int | None = None
) -> tuple[str, str]:
    """Return the call that loads a recipe, and the model as `apply` takes it."""
    steps = f", steps={as_python(repairs)}" if repairs else ""
    arguments = f'"{path}"{steps}'
    if width is not None and len(arguments) > width:
        arguments = f"\n    {arguments}\n"
    return f"Pipeline.load({arguments})", "model" if repairs or not errors else "model.eval()"


def _call(method: str) -> str:
    return f"model{'.' if method else ''}{method}(pipeline.format(batch))"
