"""Time what a replaced call costs, by the two mechanisms that were tried for the step keep_layout.

    python benchmarks/keep_cost.py [--json FILE]

A module runs 20 small operators and one `cat`, on tensors so small that only the overhead counts: as it is,
with the call rewritten, and in a `__torch_function__` mode. Prints microseconds for a forward.
"""

import argparse
import json
import timeit
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from prepare.core.utils.environment import environment
from prepare.steps.keeping import operators
from prepare.steps.keeping.find_calls import find_calls
from prepare.steps.keeping.rewrite_method import replace_calls

_FORWARDS, _REPEATS = 200, 25


class Net(nn.Module):
    """Twenty operators of torch, and one that may lose the layout."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = F.relu(x)
        return torch.cat([x, x], 2)


_SERVED = {torch.cat: operators.cat, F.pad: operators.pad, Tensor.clone: operators.clone}
_TABLE = {each: operators.otherwise(operator, each) for each, operator in _SERVED.items()}


class _Mode(TorchFunctionMode):
    """Calls the operators of keep_layout in place of torch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _TABLE.get(func, func)(*args, **(kwargs or {}))


class InMode(Net):
    """The same module, whose forward runs in the mode."""

    def forward(self, x: Tensor) -> Tensor:
        with _Mode():
            return super().forward(x)


def measure() -> dict[str, float]:
    """Return the microseconds of one forward for each mechanism."""
    torch.set_num_threads(1)
    x = torch.randn(1, 4, 2, 2, 2).to(memory_format=torch.channels_last_3d)
    replace_calls(kept := Net(), [call.name for call in find_calls(Net)])
    networks = {"as it is": Net(), "rewritten": kept, "mode": InMode()}
    with torch.no_grad():
        return {
            name: min(timeit.repeat(lambda net=net: net(x), number=_FORWARDS, repeat=_REPEATS))
            / _FORWARDS
            * 1e6
            for name, net in networks.items()
        }


def main() -> None:
    """Measure, print and write the file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure()
    for name, value in found.items():
        print(f"{name:10} {value:7.1f} us", flush=True)
    if options.json:
        report = {"microseconds": found, "environment": environment()}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
