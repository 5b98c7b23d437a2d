"""Run a script, and tell a wrong kernel from a script that cannot fail and from rounding."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import torch

from prepare.core.utils.text import first_line
from prepare.reduce.records import RAISES, SLOW, WRONG

PASSES, INVALID = "passes", "invalid"
# A gradient whose largest number is below this, where that of the outputs is about 1, is all cancellation.
_LEAST = 1e-4
_EPS = {"float32": 6e-8, "float16": 5e-4, "bfloat16": 4e-3}


def run_script(script: str, *, dtype: str = "float32", allowed: float = 1e-4) -> tuple[str, str]:
    """Run a script in this process; return its outcome and what it said.

    `invalid`: it failed before its float64 run ended, or rounding alone might explain the error.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore")
            exec(compile(script, "reduced.py", "exec"), names)  # noqa: S102  our own text
    except AssertionError as error:
        if "slow" in names:
            return SLOW, str(error)
        unsure = _is_ill_conditioned(names, _EPS[dtype], allowed)
        return (INVALID, "rounding may explain it") if unsure else (WRONG, str(error))
    except Exception as error:  # a kernel may raise anything
        text = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, MemoryError) or "right" not in names:
            return INVALID, text
        return RAISES, text
    return PASSES, printed.getvalue().strip()


def _is_ill_conditioned(names: dict[str, Any], eps: float, allowed: float) -> bool:
    """Return whether rounding alone may explain an error.

    That is so if rounding the input changes the exact results by much of what is allowed, or if a gradient
    is almost zero because large numbers cancel.
    """
    run, module, right = names["run"], names["module"], names["right"]
    given = names["given"].double()
    signs = torch.randint(0, 2, given.shape, generator=torch.Generator().manual_seed(2)) * 2 - 1
    nudged = run(module, given * (1 + eps * signs), torch.contiguous_format)
    least = _LEAST / max(1.0, given.std(correction=0).item())
    for name, exact in right.items():
        size = exact.double().abs().max().item()
        change = (nudged[name].double() - exact.double()).abs().max().item()
        if not change <= 0.5 * allowed * max(size, 1e-30) or ("gradient" in name and size < least):
            return True
    return False


def answer(request: dict[str, Any]) -> tuple[str, str]:
    """Run the script of a request, in a child process (see `prepare.core.utils.child_process`)."""
    return run_script(request["script"], dtype=request["dtype"], allowed=request["allowed"])
