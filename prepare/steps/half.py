"""Cast floating-point parameters and buffers to one dtype, as a rule to 16 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from prepare.errors import Problem
from prepare.patterns import NORMS, Patterns, declared_float32, kept_modules, matches, patterns_in
from prepare.registry import register
from prepare.step import TensorStep, Want

if TYPE_CHECKING:
    import torch

    from prepare.core.forward.input_formatter import CastResults
    from prepare.core.model.tensors import NamedTensor


@register("half")
class Half(TensorStep):
    """Casts floating-point parameters and buffers, as a rule to 16 bits; never integers or complex numbers.

    In 16 bits a kept module is in float32, whatever it was, with all modules in it. The 16-bit arguments of a
    kept module are cast to float32, its results to 16 bits, by hooks that survive deepcopy and pickle; only
    batch and instance norms take 16-bit inputs as they are. Unless `keep=[]`, what a class of diffusers or
    transformers names in `_keep_in_fp32_modules` is in float32 too; the casts are its own. In float32 and
    float64 nothing is kept apart. Under autocast, the operators inside it follow autocast.
    Helps: half the memory, and faster convolutions on hardware with 16-bit units.
    A finite value that `dtype` cannot hold is refused, as the mask value `finfo(float32).min` in bfloat16;
    with `clamp` it becomes the largest finite number of its sign.
    Hurts: float16 overflows above 65504, and the running statistics of a batch norm stop changing or
    overflow in it. Therefore `keep` skips batch and instance norms by default; `keep=[]` casts everything,
    exactly as `.half()` does. On a CPU float16 is very slow: use bfloat16 there. For training, keep float32
    parameters and use autocast. The casts of a kept module copy its inputs and results: its changes of an
    argument in place are lost, and a call that bypasses `module(...)` is not cast. To remove these casts, as
    before `model.float()`: `from prepare.steps import half; half.undo(model)`.
    Source: `torch.nn.Module.half`, `torch.nn.Module.bfloat16`; NVIDIA/apex issue 144 for the norms.
    """

    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float16"
    keep: Literal["norms"] | Patterns = "norms"
    """Patterns of modules that are in float32 beside 16 bits; `norms` means batch and instance norms."""
    clamp: bool = False
    """Clamp finite values beyond the range of `dtype` to its largest number; else they are refused."""

    def in_training(self) -> Iterable[Problem]:
        if self.dtype == "float16":
            wrong = "float16 parameters cannot be trained: GradScaler refuses them, Adam divides by zero"
            other = "precision=float32 with amp=float16, which is torch.autocast around the forward"
            yield Problem(f"steps.{self.name}.dtype", wrong, f"choose bfloat16, or {other}")

    @classmethod
    def undo(cls, model: torch.nn.Module) -> None:
        """Remove the casts around kept modules, in place; parameters keep their dtype."""
        from prepare.core.forward.input_formatter import remove_casts

        for module in model.modules():
            remove_casts(module)

    def want(self, tensor: NamedTensor) -> Want | None:
        return self._want if tensor.tensor.is_floating_point() else None

    def remarks(self, model: torch.nn.Module) -> Iterable[Problem]:
        if self._is_low and self.keep and (named := set(declared_float32(model).values())):
            wrong = f"stays in float32, as its code asks: {', '.join(sorted(named))}"
            yield Problem(f"steps.{self.name}", wrong, f"steps.{self.name}.keep=[] casts all")

    def want_of_kept(self, tensor: NamedTensor) -> Want | None:
        dtype = "float32" if self._is_low else self.dtype
        return Want(dtype=dtype, clamp=self.clamp) if tensor.tensor.is_floating_point() else None

    def targets(self, model: torch.nn.Module) -> Iterator[str]:
        from prepare.core.forward.input_formatter import casts_of

        casts = self._casts(model)
        for name, module in model.named_modules():
            # Most modules have no hook, and need no cast.
            found = casts_of(module) if module._forward_hooks else None
            if found != casts.get(id(module)):
                yield name

    def act(self, model: torch.nn.Module) -> None:
        from prepare.core.forward.input_formatter import call_in_float32, remove_casts

        casts = self._casts(model)
        for module in model.modules():
            if id(module) in casts:
                call_in_float32(module, casts[id(module)])
            else:
                remove_casts(module)

    @cached_property
    def _want(self) -> Want:
        return Want(dtype=self.dtype, clamp=self.clamp)

    @property
    def _is_low(self) -> bool:
        return self.dtype in ("float16", "bfloat16")

    def _casts(self, model: torch.nn.Module) -> dict[int, CastResults]:
        """Return the casts by the id of each module that gets them: the outermost that are kept."""
        import torch

        from prepare.core.forward.input_formatter import CastResults

        if not self._is_low or set(patterns_in(self, "keep")) <= {NORMS}:
            return {}
        kept = kept_modules(model, patterns_in(self, "keep"))
        shared = _tensors_in(model, kept)
        casts: dict[int, CastResults] = {}
        inside: set[str] = set()
        for name, module in model.named_modules(remove_duplicate=False):
            if name and name.rpartition(".")[0] in inside:
                inside.add(name)
            elif (name in kept or _holds(module, shared)) and _needs_casts(module):
                inside.add(name)
                casts[id(module)] = CastResults(torch.float32, getattr(torch, self.dtype))
        return casts


undo = Half.undo


def _needs_casts(module: torch.nn.Module) -> bool:
    """Return whether `module` is called, and cannot take 16-bit inputs with parameters in float32."""
    from prepare.core.model.module_tree import is_called

    return is_called(module) and not matches(NORMS, "", module)


def _tensors_in(model: torch.nn.Module, kept: Iterable[str]) -> set[int]:
    """Return the ids of the tensors of the kept modules."""
    tables = [(m._parameters, m._buffers) for m in map(model.get_submodule, kept)]
    return {id(t) for pair in tables for table in pair for t in table.values() if t is not None}


def _holds(module: torch.nn.Module, tensors: set[int]) -> bool:
    """Return whether `module` holds one of the tensors, such as a tied weight."""
    own = (*module._parameters.values(), *module._buffers.values())
    return not tensors.isdisjoint(map(id, own))
