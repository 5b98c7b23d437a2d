"""Write a call of one module as a script that needs torch alone and fails on a wrong result, and run it."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import torch

from prepare.core.utils.text import first_line
from prepare.stages.reduce.records import RAISES, SLOW, WRONG, ModuleCall

PASSES, INVALID = "passes", "invalid"
# A gradient whose largest number is below this, where that of the outputs is about 1, is all cancellation.
_LEAST = 1e-4
_EPS = {"float32": 6e-8, "float16": 5e-4, "bfloat16": 4e-3}
_WRONG = '''"""nn.{kind}{where}: its results differ from float64."""
import copy
import torch
from torch import nn

def run(module, given, layout):
    given = given.clone(memory_format=layout).requires_grad_()
    module = copy.deepcopy(module).to(given).to(memory_format=layout)
    out = module(given)
{backward}    return {results}
torch.manual_seed(0)
module = nn.{kind}({options}){mode}{cast}
given = {given}
right = run(module, given.double(), torch.contiguous_format)
{loop}found = run(module, given{there}, torch.{layout})
{pad}for name, exact in right.items():
{pad}    error = (found[name]{here}.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
{pad}    print(f"{{name}}: error {{error:.1e}}")
{pad}    assert error <= {allowed}, f"{{name}}: error {{error:.1e}}, allowed {allowed}"
print("all right with torch", torch.__version__)
'''
_BACKWARD = """    torch.manual_seed(1)
    gradient = torch.randn(out.shape){rounded}.to(out)
    out.backward(gradient.to(memory_format=layout))
"""
_RESULTS = """{"outputs": out.detach(), "input gradients": given.grad, **dict(module.named_buffers()),
            **{f"gradient of {n}": p.grad for n, p in module.named_parameters()}}"""
_SLOW = '''"""nn.{kind}{where}: slow in this memory format."""
import time
import torch
from torch import nn

def prepared(layout):
    module = nn.{kind}({options}){mode}{cast}{there}.to(memory_format=layout)
    return module, {given}{there}.to(memory_format=layout).requires_grad_()

def seconds(module, given):
    began = time.perf_counter()
    out = module(given)
    {step}
    {wait}
    return time.perf_counter() - began

pairs = [prepared(torch.{layout}), prepared(torch.contiguous_format)]
times = [[seconds(*pair) for pair in pairs] for _ in range(12)]
slow, fast = (min(column) for column in zip(*times))
print(f"{{slow:.2e}} s, contiguous {{fast:.2e}} s")
assert slow <= {factor} * fast, f"{{slow / fast:.1f}} times the time of the contiguous format"
print("fast enough with torch", torch.__version__)
'''
# The factor from which on a format counts as slow.
FACTOR = 3.0


def script_of(call: ModuleCall) -> str:
    """Return the script of at most 25 lines."""
    dtype = f"torch.{call.dtype}"
    given = f"torch.randn({', '.join(map(str, call.shape))})"
    if call.deviation != 1.0:
        given += f" * {call.deviation:g}"
    if call.mean:
        given += f" + {call.mean:g}"
    is_sum = call.deviation != 1.0 or bool(call.mean)
    if is_sum and (call.slow or call.dtype != "float32"):
        given = f"({given})"
    if call.dtype != "float32":
        given += f".to({dtype})"
    loops, backward, results = call.repeats > 1, "", '{"outputs": out.detach()}'
    if call.backward:
        backward = _BACKWARD.format(rounded="" if call.dtype == "float32" else f".to({dtype})")
        results = _RESULTS
    there = "" if call.device == "cpu" else f'.to("{call.device}")'
    values = {
        "kind": call.kind,
        "where": f" ({call.format}, {call.dtype})",
        "options": ", ".join(f"{key}={value!r}" for key, value in call.arguments + call.options),
        "mode": "" if call.training else ".eval()",
        "there": there,
        "here": ".cpu()" if there else "",
        "wait": "out.sum().item()" if there else "",
        "cast": "" if call.dtype == "float32" else f".to({dtype})",
        "given": given,
        "dtype": dtype,
        "layout": "contiguous_format" if call.format == "contiguous" else call.format,
        "allowed": f"{call.limit:g}",
        "results": results,
        "backward": backward,
        "loop": f"for _ in range({call.repeats}):\n    " if loops else "",
        "pad": "    " if loops else "",
        "step": "out.backward(torch.ones_like(out))" if call.backward else "",
        "factor": f"{FACTOR:g}",
    }
    text = (_SLOW if call.slow else _WRONG).format(**values)
    return "\n".join(line for line in text.splitlines() if line.strip() or not line) + "\n"


def plain_options(options: Any) -> bool:
    """Return whether options can be written as Python code and read again."""
    return all(
        isinstance(value, bool | int | float | str | None)
        or (isinstance(value, tuple) and plain_options(dict(enumerate(value))))
        for value in options.values()
    )


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
