"""Run convolutions as other operations that are exactly equal, where that is faster here."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

from prepare.errors import ConfigError, PatternError, Problem, raise_problems
from prepare.patterns import Patterns, exactly, matches, near_misses
from prepare.registry import register
from prepare.steps.conv_memory_format import SwapsClasses
from prepare.steps.repairs import all_rewrites

if TYPE_CHECKING:
    import torch

    from prepare.steps.repairs.rewrites import Rewrite

_NAMES = ("linear", "lower_rank", "one_frame", "one_position", "pointwise")


@register("rewrite_conv")
class RewriteConv(SwapsClasses):
    """Runs convolutions as exactly equal operations: products, 2-d convolutions, one frame of a video.

    Each option but `include`, `exclude` and `force` names the modules of one rewrite:
    `linear` (the kernel is the stride: patch embeddings), `pointwise` (one pixel), `lower_rank` (3-d kernels
    that are flat in time or space), `one_frame` (causal convolutions whose other frames are zeros) and
    `one_position` (the kernel is as large as the input). Without names, a run times every convolution that
    fits with its example, in pairs against torch's own, and writes into its recipe what is faster beyond the
    noise, as `Pipeline.apply(model, example=batch)` does. Without an example only `one_position` is taken,
    which was never slower. A rewritten module keeps its identity, Parameters, hooks and state_dict: its class
    becomes a subclass of its own. Calls that a rewrite is not for run torch's own code.
    Helps: the patch embeddings of vision transformers, in training with a gradient of their input above all;
    one image through the decoder of a video model.
    Hurts: chosen by hand, it may be slower: small contiguous kernels copy their input. Products are summed in
    another order. To undo it: `from prepare.steps import rewrite_conv; rewrite_conv.undo(model)`.
    Source: `benchmarks/results/rewrites.md` has our measurements.
    """

    force: bool = False
    """Rewrite all that fits, whatever is faster."""
    linear: Patterns | None = None
    lower_rank: Patterns | None = None
    one_frame: Patterns | None = None
    one_position: Patterns | None = None
    pointwise: Patterns | None = None

    @classmethod
    def swaps(cls) -> Collection[Rewrite]:
        return all_rewrites().values()

    def targets(self, model: torch.nn.Module) -> Iterator[str]:
        for name, rewrite in self._wanted(model).items():
            if not rewrite.is_repaired(model.get_submodule(name)):
                yield name

    def rewrites(
        self, model: torch.nn.Module, names: Iterable[str]
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Rewrite all modules in `names` for the formats that are found once."""
        formats, wanted = self.formats(model), self._wanted(model)
        for name in names:
            module = model.get_submodule(name)
            self.undo_module(module)
            wanted[name].repair(module, formats)
            yield name, module

    def without_example(self) -> str:
        is_chosen = self._is_auto and not self.force
        return "auto takes only what was never slower" if is_chosen else ""

    def for_example(
        self, model: torch.nn.Module, example: Any, *, backward: bool, amp: Any
    ) -> tuple[Self, list[str]]:
        from prepare.steps.repairs.choose_rewrites import choose_rewrites

        self.undo(model)
        choice = choose_rewrites(
            model, example, self.tried(model), self.formats(model), backward=backward, amp=amp
        )
        if choice.failure:
            return self, [f"steps.{self.name}: {self.without_example()}: {choice.failure}"]
        named: dict[str, list[str]] = {name: [] for name in _NAMES} | choice.names
        chosen: dict[str, Any] = {
            option: tuple(map(exactly, names)) for option, names in named.items()
        }
        return dataclasses.replace(self, **chosen), [f"steps.{self.name}: {choice.text()}"]

    def tried(self, model: torch.nn.Module) -> dict[str, list[Rewrite]]:
        """Return the rewrites that an example would be timed with, for each convolution."""
        tried: dict[str, list[Rewrite]] = {}
        shared = self._shared(model)
        for name, module in model.named_modules():
            if module in shared:
                continue
            fitting = [each for each in self.swaps() if not each.never_loses and each.fits(module)]
            skipped = any(matches(each, name, module) for each in self.exclude)
            kept = not self.include or any(matches(each, name, module) for each in self.include)
            if fitting and kept and not skipped:
                tried[name] = fitting
        return tried

    def _shared(self, model: torch.nn.Module) -> set[torch.nn.Module]:
        """Return the modules that share their weight, where a format is requested: it can have one only."""
        holders = defaultdict[Any, set["torch.nn.Module"]](set)
        if self.formats(model):
            for module in model.modules():
                holders[module._parameters.get("weight")].add(module)
        found = (each for weight, each in holders.items() if weight is not None and len(each) > 1)
        return set().union(*found)

    @property
    def _is_auto(self) -> bool:
        return all(getattr(self, name) is None for name in _NAMES)

    def _wanted(self, model: torch.nn.Module) -> dict[str, Rewrite]:
        """Return the rewrite of each module that this step names, or finds."""
        if not self._is_auto:
            return self._named(model)
        wanted: dict[str, Rewrite] = {}
        shared = self._shared(model)
        for name, module in model.named_modules():
            if module in shared:
                continue
            done = next((each for each in self.swaps() if each.is_repaired(module)), None)
            fitting = (each for each in self.swaps() if self.force or each.never_loses)
            fit = next((each for each in fitting if each.fits(module)), None)
            if rewrite := (done if self.force else None) or (None if done else fit):
                wanted[name] = rewrite
        return wanted

    def _named(self, model: torch.nn.Module) -> dict[str, Rewrite]:
        """Return the rewrite of each module that the patterns name.

        Raises:
            PatternError: a pattern matches no module.
            ConfigError: a rewrite does not fit the modules of a pattern, or two are named for one.
        """
        modules, wanted = dict(model.named_modules()), dict[str, "Rewrite"]()
        problems = []
        for rewrite in self.swaps():
            where = f"steps.{self.name}.{rewrite.name}"
            for pattern in getattr(self, rewrite.name) or ():
                named = [name for name, module in modules.items() if matches(pattern, name, module)]
                fitting = [name for name in named if not rewrite.reason(modules[name])]
                if not named:
                    wrong = f"{pattern!r} matches no module of {type(model).__name__}"
                    fit = {n: m for n, m in modules.items() if not rewrite.reason(m)}
                    raise PatternError(where, wrong, near_misses(pattern, fit or modules))
                if not fitting:
                    reason = rewrite.reason(modules[named[0]])
                    wrong = f"it does not fit {named[0] or type(model).__name__}: {reason}"
                    problems.append(Problem(where, wrong, "name a convolution that it fits"))
                for name in fitting:
                    if wanted.setdefault(name, rewrite) is not rewrite:
                        where_named = name or type(model).__name__
                        wrong = f"{where_named} is named for {wanted[name].name} too"
                        problems.append(Problem(where, wrong, "name it once"))
        raise_problems(ConfigError, problems)
        return wanted


undo = RewriteConv.undo
