"""Run convolutions with the batch norm, addition and activation after them, on packed weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prepare.core.utils.text import EVAL_MODE, plural
from prepare.errors import Problem
from prepare.registry import register
from prepare.steps.conv_memory_format import SwapsClasses

if TYPE_CHECKING:
    import torch

    from prepare.steps.repairs.base import SwapClass

_WORDS = {"batch_norm": "batch norm", "add": "addition", "relu": "ReLU", "silu": "SiLU"}
_WORDS |= {"gelu": "GELU", "hardswish": "Hardswish", "leaky_relu": "LeakyReLU", "relu6": "ReLU6"}


@register("fuse_inference")
class FuseInference(SwapsClasses):
    """Runs each convolution with its batch norm, addition and activation, on a weight in oneDNN's format.

    For inference on a CPU, in float32 and bfloat16, and for inputs in channels-last: every other call runs
    torch's own code, as a call that needs gradients, or under autocast or a compiler. Modules keep their
    identity, Parameters, buffers and hooks, and `state_dict`: the folded and packed weights are made at the
    first call, and again when a value has changed. A symbolic trace shows what follows a convolution; if
    something else reads its result, torch's own is computed.
    Where a call has few multiplications, its weight is not packed.
    Helps: one pass over memory where there were three, and no weight that oneDNN reorders at each call.
    Hurts: packed weights need memory of their own, as much as the Parameters. Takes the place of
    `fuse_conv_bn`, which needs none. To undo it: `from prepare.steps import fuse_inference;
    fuse_inference.undo(model)`.
    Source: the operators of torch's inductor, as `torch.ops.mkldnn._convolution_pointwise`; private ones:
    where torch has others, the step does nothing and says so.
    """

    @classmethod
    def swaps(cls) -> Collection[SwapClass]:
        from prepare.steps.repairs.fused import FUSION

        return (FUSION,)

    @classmethod
    def undo(cls, model: torch.nn.Module) -> None:
        from prepare.core.model.module_tree import remove_hooks
        from prepare.steps.repairs.fused import Around

        super().undo(model)
        for module in model.modules():
            remove_hooks(module, Around)

    def in_training(self) -> Iterable[Problem]:
        wrong = "is for inference: in training all calls run torch's own code"
        yield Problem(f"steps.{self.name}", wrong, f"{EVAL_MODE}, or drop the step")

    def targets(self, model: torch.nn.Module) -> Iterator[str]:
        from prepare.steps._following import find_followed
        from prepare.steps.repairs.fused import FUSION, missing

        named = {} if missing() else dict(model.named_modules())
        names = [name for name, each in named.items() if FUSION.fits(each) and not each.training]
        yield from names
        # The parts of the model whose forward was traced: a hook tells convolutions when it runs.
        if names:
            yield from find_followed(model)[0]

    def rewrites(
        self, model: torch.nn.Module, names: Iterable[str]
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        from prepare.steps._following import find_followed
        from prepare.steps.repairs.fused import FUSION, Around

        parts, followed = find_followed(model)
        for name in names:
            module = model.get_submodule(name)
            if FUSION.fits(module):
                FUSION.repair(module, self.formats(model))
                vars(module)["chain"] = followed.get(module, ())
                yield name, module
        for name in parts:
            part = model.get_submodule(name)
            if not any(isinstance(each, Around) for each in part._forward_hooks.values()):
                part.register_forward_pre_hook(Around())
                part.register_forward_hook(Around(), always_call=True)
                yield name, part

    def remarks(self, model: torch.nn.Module) -> Iterator[Problem]:
        from prepare.steps.repairs.fused import FUSION, missing

        fused: list[Any] = [each for each in model.modules() if FUSION.is_repaired(each)]
        for chain, count in Counter(each.chain for each in fused).items():
            words = " and ".join(_WORDS.get(each, each) for each in (*chain, "packed weights"))
            yield Problem(f"steps.{self.name}", f"{plural(count, 'convolution')} with {words}")
        if missing():
            yield Problem(f"steps.{self.name}", f"nothing is fused: {missing()}")


undo = FuseInference.undo
