"""Write a call of one module as a script that needs torch alone, and fails on wrong or slow results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prepare.reduce.records import ModuleCall

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
    if call.dtype != "float32":
        given = (
            f"({given}).to({dtype})" if "* " in given or "+ " in given else f"{given}.to({dtype})"
        )
    elif call.slow and given != given.partition(" ")[0] and (call.mean or call.deviation != 1.0):
        given = f"({given})"
    results = '{"outputs": out.detach()}'
    if call.backward:
        results = '{"outputs": out.detach(), "input gradients": given.grad, **dict(module.named_buffers()),\n'
        results += (
            '            **{f"gradient of {n}": p.grad for n, p in module.named_parameters()}}'
        )
    loops = call.repeats > 1
    values = {
        "kind": call.kind,
        "where": f" ({call.format}, {call.dtype})",
        "options": ", ".join(f"{key}={value!r}" for key, value in call.arguments + call.options),
        "mode": "" if call.training else ".eval()",
        "there": "" if call.device == "cpu" else f'.to("{call.device}")',
        "here": "" if call.device == "cpu" else ".cpu()",
        "wait": "" if call.device == "cpu" else "out.sum().item()",
        "cast": "" if call.dtype == "float32" else f".to({dtype})",
        "given": given,
        "dtype": dtype,
        "layout": "contiguous_format" if call.format == "contiguous" else call.format,
        "allowed": f"{call.limit:g}",
        "results": results,
        "backward": _BACKWARD.format(rounded="" if call.dtype == "float32" else f".to({dtype})")
        if call.backward
        else "",
        "loop": f"for _ in range({call.repeats}):\n    " if loops else "",
        "pad": "    " if loops else "",
        "step": "out.backward(torch.ones_like(out))" if call.backward else "",
        "factor": f"{FACTOR:g}",
    }
    template = _SLOW if call.slow else _WRONG
    text = template.format(**values)
    return "\n".join(line for line in text.splitlines() if line.strip() or not line) + "\n"


def plain_options(options: Any) -> bool:
    """Return whether options can be written as Python code and read again."""
    return all(
        isinstance(value, bool | int | float | str | None)
        or (isinstance(value, tuple) and plain_options(dict(enumerate(value))))
        for value in options.values()
    )
