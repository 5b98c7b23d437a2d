"""Run convolutions with the batch norm, addition and activation after them, on packed weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from prepare.core.utils.text import first_line, plural
from prepare.errors import Problem
from prepare.registry import register
from prepare.steps.conv_memory_format import SwapsClasses

if TYPE_CHECKING:
    import torch

    from prepare.steps.repairs.base import SwapClass

# Rounds of one call each, and the part of the time that it must need less than.
_ROUNDS, _LEAST = 6, 0.97
# After so many seconds these rounds are enough.
_SECONDS, _FEWEST = 0.3, 3
_SHOWN = 3


@register("fuse_inference")
class FuseInference(SwapsClasses):
    """Runs a convolution with its batch norm, an addition or an activation, on a weight in oneDNN's format.

    For inference on a CPU, in float32 and bfloat16, and for inputs in channels-last: every other call runs
    torch's own code, as a call that needs gradients, or under autocast or a compiler. Modules keep their
    identity, Parameters, buffers and hooks, and `state_dict`: the folded and packed weights are made at the
    first call, and again when a value has changed. A symbolic trace shows what follows a convolution; if
    something else reads its result, torch's own is computed. Wide linear layers run on packed weights too.
    With an input or a weight that holds NaN or an infinity nothing is fused: oneDNN's ReLU gives 0 for NaN.
    Helps: one pass over memory where there were three, and no weight that oneDNN reorders at each call.
    Hurts: packed weights need memory of their own, as much as the Parameters. Takes the place of
    `fuse_conv_bn`, which needs none. To undo it: `from prepare.steps import fuse_inference;
    fuse_inference.undo(model)`.
    Source: the operators of torch's inductor, as `torch.ops.mkldnn._convolution_pointwise`; private ones:
    where torch has others, the step does nothing and says so.
    """

    @classmethod
    def swaps(cls) -> Collection[SwapClass]:
        from prepare.steps.repairs.fused import FUSION, LINEAR

        return FUSION, LINEAR

    @classmethod
    def undo(cls, model: torch.nn.Module) -> None:
        from prepare.core.model.module_tree import remove_hooks
        from prepare.steps.repairs.fused import Around

        super().undo(model)
        for module in model.modules():
            remove_hooks(module, Around)

    def targets(self, model: torch.nn.Module) -> Iterator[str]:
        from prepare.steps._fusion import find_followed
        from prepare.steps.repairs.fused import Around, missing

        named = {} if missing() else dict(model.named_modules())
        modes = ((name, each) for name, each in named.items() if not each.training)
        names = [name for name, each in modes if any(swap.fits(each) for swap in self.swaps())]
        yield from names
        # The parts of the model whose forward was traced: a hook tells convolutions when it runs.
        parts = find_followed(model)[0] if names else []
        yield from (name for name in parts if not Around.is_on(named[name]))

    def rewrites(
        self, model: torch.nn.Module, names: Iterable[str]
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        from prepare.steps._fusion import find_followed
        from prepare.steps.repairs.fused import FUSION, Around

        parts, followed = find_followed(model)
        for name in names:
            module = model.get_submodule(name)
            if swap := next((each for each in self.swaps() if each.fits(module)), None):
                swap.repair(module, self.formats(model))
                if swap is FUSION:
                    vars(module)["chain"] = followed.get(module, ())
                yield name, module
        for name in parts:
            if not Around.is_on(part := model.get_submodule(name)):
                part.register_forward_pre_hook(Around(), with_kwargs=True)
                part.register_forward_hook(Around(), with_kwargs=True, always_call=True)
                yield name, part

    def remarks(self, model: torch.nn.Module) -> Iterator[Problem]:
        from prepare.steps._fusion import find_followed
        from prepare.steps.repairs.fused import FUSION, missing

        if lost := missing():
            yield Problem(f"steps.{self.name}", f"nothing is fused: {lost}")
            return
        followed = find_followed(model)[1]
        here = [(name, m) for name, m in model.named_modules() if FUSION.is_repaired(m)]
        alone = [name for name, module in here if module not in followed]
        if alone:
            shown = f"{', '.join(alone[:_SHOWN])}{' ...' if len(alone) > _SHOWN else ''}"
            wrong = f"{plural(len(alone), 'convolution')} without what follows ({shown})"
            why = "called more than once, or in a forward that torch.fx cannot trace"
            yield Problem(f"steps.{self.name}", f"{wrong}: {why}")

    def without_example(self) -> str:
        return "" if self.include or self.exclude else "whether it is faster is not measured"

    def for_example(
        self, model: torch.nn.Module, example: Any, *, backward: bool, amp: Any
    ) -> tuple[Self, list[str]]:
        import torch

        from prepare.core.forward.unchanged import unchanged
        from prepare.core.model.module_tree import copy_tree

        fused, times = copy_tree(model), list[float]()
        packed: list[Any] = [
            m for _, m in self.rewrites(fused, [*self.targets(fused)]) if hasattr(m, "weight")
        ]
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        try:
            with unchanged(model, example.args, example.kwargs), torch.no_grad():
                end = time.perf_counter() + _SECONDS
                while packed and len(times) < (_ROUNDS if time.perf_counter() < end else _FEWEST):
                    marks = [clock()]
                    for each in (model, fused):
                        each(*example.args, **example.kwargs)
                        marks.append(clock())
                    times.append((marks[2] - marks[1]) / (marks[1] - marks[0]))
        except Exception as error:  # the run says where the model fails
            return self, [f"steps.{self.name}: the example cannot be run: {first_line(error)}"]
        ratio, size = median(times[1:] or [1.0]), sum(m.weight.nbytes for m in packed) / 2**20
        option, word = ("include", "fused") if ratio < _LEAST else ("exclude", "left out")
        note = f"{word}: {ratio:.2f} of the time; packed weights take {size:.1f} MiB"
        return dataclasses.replace(self, **{option: ("*",)}), [f"steps.{self.name}: {note}"]


undo = FuseInference.undo
