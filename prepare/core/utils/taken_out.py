"""Tell what earlier versions took on the command line and in recipes, and what to use in its place."""

from __future__ import annotations

from prepare.errors import Problem

# The words that were taken out, as on the command line, and what to use. The next release drops the rows.
TAKEN_OUT = {
    "task=reduce": "task=prepare mode=train verify=full, which names the first module that is wrong",
    "steps.quantize": "torchao.quantize_(model, config) on the prepared model, or in a step of your own",
    "tune.allow=quantize": "torchao.quantize_(model, config) on the prepared model",
    **dict.fromkeys(("doctor share", "doctor --folder", "doctor folder"), "what `doctor` prints"),
    "doctor --dry-run": "doctor --device cpu",
    "optimize": "task=tune for the fastest recipe, or values with commas and --multirun",
    "hydra/sweeper=optuna": "task=tune for the fastest recipe, or values with commas and --multirun",
}


def taken_out(*words: str) -> Problem | None:
    """Return the problem of the first of `words` that was taken out; None if none was."""
    for word in words:
        if word in TAKEN_OUT:
            return Problem(word, "was taken out", f"use {TAKEN_OUT[word]}")
    return None
