"""Rewrite the lines of a model's own code that lose a channels-last layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from prepare.core.utils.suggest import nearest
from prepare.errors import ConfigError, Problem, raise_problems
from prepare.patterns import Patterns
from prepare.registry import register
from prepare.step import ForRecipes
from prepare.steps.conv_memory_format import ForChannelsLast

if TYPE_CHECKING:
    import torch

    from prepare.steps.keeping.calls import CodeCall


@register("keep_layout")
class KeepLayout(ForChannelsLast):
    """Makes the model's own code keep a channels-last layout: calls in it are replaced, in memory.

    `calls` names them by class, method and code: `WanCausalConv3d.forward: F.pad(x, padding)`. With `auto`, a
    run takes the calls by which the predicted layout flow of its example gains, and writes them into its
    recipe, as `Pipeline.apply(model, example=batch)` does; without an example, all calls of
    `pad`, `cat`, `clone`, `repeat` and `repeat_interleave`. A replaced call has the same values; it returns
    channels-last if its operands are in it; for all else it is torch's own call. A call with rarer arguments
    (`out`, `axis`) is left alone, and so is a method that is decorated or overridden, or whose file has been
    changed since it was loaded.
    `.contiguous()`, `.view()`, `.reshape()`, `.flatten()`, `einops.rearrange` and `+` are taken only if they
    are named. The module's class becomes a subclass of the same name with rewritten methods; the
    module keeps its identity, hooks and state_dict, and can be copied, pickled, compiled and trained.
    Helps: video autoencoders (Wan, HunyuanVideo), which pad, join and copy frames between convolutions.
    Hurts: without an example it may lose more than it keeps, where code needs a contiguous result. A
    replaced call takes some microseconds more, which small activations do not earn back. Code that needs
    the contiguous result of a named `.contiguous()` may raise an error. To undo it:
    `from prepare.steps import keep_layout; keep_layout.undo(model)`.
    Source: SGLang changed such lines by hand.
    """

    keeps_tensors: ClassVar[bool] = True
    calls: Literal["auto"] | Annotated[tuple[str, ...], "a list of texts", ForRecipes()] = "auto"
    """The calls to replace; `auto` finds them."""
    include: Patterns = ()
    exclude: Patterns = ()

    def candidates(self, model: torch.nn.Module) -> Iterator[str]:
        for name, module in model.named_modules(remove_duplicate=False):
            if _calls(module):
                yield name

    def targets(self, model: torch.nn.Module) -> Iterator[str]:
        from prepare.steps.keeping.calls import replaced_calls

        self._check_names(model)
        if not self.formats(model):
            return
        for name, module in model.named_modules():
            wanted = self._names(module)
            if wanted and not set(wanted) <= set(replaced_calls(module)):
                yield name

    def rewrite(self, model: torch.nn.Module, name: str) -> Mapping[str, torch.nn.Module]:
        from prepare.steps.keeping.calls import replace_calls

        module = model.get_submodule(name)
        replace_calls(module, self._names(module))
        return {name: module}

    def remarks(self, model: torch.nn.Module) -> Iterator[Problem]:
        from prepare.core.model.module_kinds import foreign_method
        from prepare.steps.keeping.calls import find_calls

        for name, module in model.named_modules() if self.formats(model) else ():
            calls = find_calls(type(module))
            for method in dict.fromkeys(call.method for call in calls if self._takes(call)):
                if foreign_method(module, method) is None:
                    continue
                wrong = f"{self.name} replaces no call in {method}: another one lies on the object"
                remedy = "prepare the model first, then add hooks to it"
                yield Problem(name or type(module).__name__, wrong, remedy)

    def without_example(self) -> str:
        return "calls: auto takes all calls of operators" if self.calls == "auto" else ""

    def for_example(
        self, model: torch.nn.Module, example: Any, *, backward: bool, amp: Any
    ) -> tuple[Self, list[str]]:
        from prepare.core.utils.text import plural
        from prepare.steps.keeping.calls import choose_calls

        choice = choose_calls(model, example, amp=amp)
        where = f"steps.{self.name}.calls"
        if choice.before.status != "ok":
            reason = f"the flow cannot be predicted: {choice.before.reason}"
            return self, [f"steps.{self.name}.{self.without_example()}: {reason}"]
        if choice.names:
            return replace(self, calls=choice.names), []
        breaks = choice.before.summary["breaks"]
        lost = f"none of {plural(breaks, 'break')} can be removed"
        why = lost if breaks else "nothing loses the layout"
        text = f"{where}: no call of the model's own code is replaced: {why}"
        return replace(self, calls=()), [text]

    @classmethod
    def undo(cls, model: torch.nn.Module) -> None:
        """Give every module of `model` its own class back, in place."""
        from prepare.steps.keeping.calls import put_back

        for module in model.modules():
            put_back(module)

    def _check_names(self, model: torch.nn.Module) -> None:
        known = {call.name for module in model.modules() for call in _calls(module)}
        problems = []
        for name in () if self.calls == "auto" else self.calls:
            if name not in known:
                close = nearest(name, sorted(known))
                remedy = f"did you mean {close[0]!r}?" if close else "write auto, which finds them"
                wrong = f"{name!r} is not a call in the code of {type(model).__name__}"
                problems.append(Problem(f"steps.{self.name}.calls", wrong, remedy))
        raise_problems(ConfigError, problems)

    def _names(self, module: torch.nn.Module) -> tuple[str, ...]:
        """Return the names of the calls to replace in a module."""
        return tuple(call.name for call in _calls(module) if self._takes(call))

    def _takes(self, call: CodeCall) -> bool:
        from prepare.steps.keeping.calls import SAFE

        return call.operator in SAFE if self.calls == "auto" else call.name in self.calls


undo = KeepLayout.undo


def _calls(module: torch.nn.Module) -> list[CodeCall]:
    from prepare.steps.keeping.calls import calls_of

    return list(calls_of(module))
