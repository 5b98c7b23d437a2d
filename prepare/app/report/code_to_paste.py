"""Write code to paste that prepares and calls a model as a run has, in some lines or in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.core.utils.machine import how_threads_waited
from prepare.core.utils.text import printable
from prepare.core.utils.wording import as_python

if TYPE_CHECKING:
    from prepare.app.job.record import Results

_INDENT = "    "


def training_code(run: Results) -> str:
    """Return code that loads the recipe, applies it to a `model` as the run has, and calls it.

    If training with the recipe is an error, the code prepares the model for inference, and names the steps
    that training needs. That of a training run has the loop with the optimizer, and scales the gradients of
    float16. It is empty without a recipe.
    """
    if run.recipe is None:
        return ""
    plan, training = run.plan or {}, run.is_training
    timed = bool(run.result and run.result.figures and run.result.figures.get("time_ratio"))
    lines = []
    if timed and (waiting := printable(how_threads_waited(run.environment or {}))):
        lines.append(f"# Timed with {waiting}: set it for your program too.")
    if run.amp != "none":
        lines.append("import torch")
    lines += ["from prepare.pipeline import Pipeline", ""]
    if repairs := plan.get("training_steps"):
        load = f'Pipeline.load("recipe.yaml", steps={as_python(repairs)})'
        lines.append(f"# This recipe is for inference. To train, use {load}.")
    elif plan.get("training_errors"):
        lines.append("# For inference only: training mode is an error, see Warnings.")
    lines.append('pipeline = Pipeline.load("recipe.yaml")')
    lines.append(f"model = pipeline.apply({_prepared(run)})  # in place, the same object")
    device = run.steps.get("device", {}).get("device", "cpu").partition(":")[0]
    work = [f"loss = criterion({_call(run)}, target)" if training else f"output = {_call(run)}"]
    if run.amp != "none":
        entered = f'with torch.autocast("{device}", torch.{run.amp}):'
        work = [entered, *(f"{_INDENT}{each}" for each in work)]
    if not training:
        return "\n".join([*lines, *work])
    backward = ["loss.backward()", "optimizer.step()"]
    if run.amp == "float16":
        lines.append(f'scaler = torch.amp.GradScaler("{device}")')
        backward = ["scaler.scale(loss).backward()", "scaler.step(optimizer)", "scaler.update()"]
    loop = ["optimizer.zero_grad()", *work, *backward]
    lines += ["for batch, target in loader:", *(f"{_INDENT}{each}" for each in loop)]
    return "\n".join(lines)


def one_line(run: Results) -> str:
    """Return one line that loads the recipe and applies it, as `training_code` does.

    It ends with a call if that is not `model(batch)`: a method, or a batch that has to be formatted.
    """
    load, prepared = 'Pipeline.load("recipe.yaml")', _prepared(run)
    if not (_method(run) or run.formats):
        return f"{load}.apply({prepared})"
    return f"pipeline = {load}; pipeline.apply({prepared}); {_call(run)}"


def _prepared(run: Results) -> str:
    """Return what `apply` is given: with errors in training mode the model for inference."""
    errors = (run.plan or {}).get("training_errors")
    given = "model.eval()" if errors else "model"
    return f"{given}, optimizer=optimizer" if run.is_training else given


def _method(run: Results) -> str:
    method = run.model.partition(".")[2]
    return method if method.isidentifier() else ""


def _call(run: Results) -> str:
    return f"{'.'.join(filter(None, ('model', _method(run))))}(pipeline.format(batch))"
