"""Watch a prepared model: decide at each call whether to look, and act on a difference."""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args

import torch
from torch import nn

from prepare.core.forward.call import call_of
from prepare.core.forward.compiled import is_compiled
from prepare.core.forward.unchanged import ModelState, unchanged
from prepare.core.forward.workload import Workload, sizes_of
from prepare.core.utils.process_state import PROCESS_STATE
from prepare.core.utils.signals import held_interrupts
from prepare.core.utils.suggest import choose
from prepare.core.utils.text import first_line, plural, size
from prepare.errors import DriftError, Problem, RefusedError, raise_problems
from prepare.guard.attach import attach
from prepare.guard.compare import WrongModule, autocast_of, difference, relative, too_large
from prepare.guard.originals import Originals, obstacle, watched_modules
from prepare.guard.record import Watcher, describe_call, key_of
from prepare.guard.respond import OnDifference, Response
from prepare.guard.turns import Turns
from prepare.pipeline.drift import Drift, Guard, optimizer_drift, plan_drift, raise_drift
from prepare.pipeline.optimizer_state import unwrap_optimizer
from prepare.stages.verify.execution.module_calls import CallInterceptor, RecordedCall

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from prepare.pipeline import Pipeline, Plan

_log = logging.getLogger(__name__)
# The most keys that are remembered; a key of before is then looked at again.
_KEYS = 1 << 16
# The looks after which it is said how long those of all modules take.
_TOLD = 20
_ACTION = {"raise": "raises", "warn": "warns once", "fallback": "puts torch's own class back"}


class ModelGuard(Guard):
    """Looks at the modules of a prepared model while it serves and trains; made by `Pipeline.guard`.

    Its text says what it looks at and what that costs. Call it after each training step to look for drift
    there too; `remove` it, or use it as a context manager, to end it. A copy of the model is not guarded.

    Attributes:
        watched: the names of the modules that are looked at, each with how the pipeline changed it.
        left_out: the names of modules that could not be looked at, each with the reason.
        differences: what was found, as a list of `WrongModule`.
        looks: the number of modules that were compared so far; `seconds_used` is the time of that.
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        *,
        every: int,
        on_difference: OnDifference = "raise",
        optimizer: Optimizer | None = None,
        seconds: float = 10.0,
        max_bytes: int = 1 << 30,
        share: float = 0.01,
        folder: str | Path | None = None,
    ) -> None:
        if on_difference not in get_args(OnDifference):
            remedy = choose(str(on_difference), get_args(OnDifference))
            raise RefusedError("on_difference", f"{on_difference!r} is not allowed", remedy)
        raise_problems(RefusedError, _limits(seconds, max_bytes, share))
        plan = pipeline.plan(model, known_issues="ignore")
        raise_drift(plan_drift(plan))
        super().__init__(model, every=every)
        self._model, self._pipeline = model, pipeline
        self._optimizer = None if optimizer is None else unwrap_optimizer(optimizer)
        self._seconds, self._max_bytes, self._share = seconds, max_bytes, share
        self._originals = Originals(model, pipeline)
        path = None if folder is None else Path(folder)
        self._response = Response(pipeline, self._originals, on_difference, self._optimizer, path)
        self._watch(plan)
        self._other_mode = {n for n, m in model.named_modules() if m.training != model.training}
        self.differences: list[WrongModule] = self._response.differences
        self.looks, self.seconds_used = 0, 0.0
        # Keys of which all was looked at; and of others, what was.
        self._known: set[Hashable] = set()
        self._seen: dict[Hashable, set[Hashable]] = {}
        self._turns, self._steps, self._is_told = Turns(every=every, share=share), 0, False
        self._recorded: list[tuple[RecordedCall, nn.Module, str]] = []
        # The thread that looks; the watcher of a model's call, its key, and when no look begins any more.
        self._thread: int | None = None
        self._current: tuple[Watcher, Hashable | None, float] | None = None
        self._look = ExitStack()
        # What `look` restores.
        self._state: ModelState | None = None
        self._detach = attach(self, model)

    def __call__(self) -> None:
        """Count a training step, and compare what the forward recorded; on every `every`-th, look for drift.

        Raises:
            DriftError: the model has drifted.
            GuardError: a module differs from torch's own, with `on_difference="raise"`.
        """
        self._end_look()  # that of a forward which was interrupted
        self._compare_recorded()
        super().__call__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        self.remove() if kind is None else self._end()

    def look(self, workload: Workload | Any) -> None:
        """Look now at all modules in each size of a workload, so that in serving its calls cost a look-up.

        The model runs once in each size as it would serve: without gradients, in its mode and under the
        autocast of the caller. The option `seconds` does not bound it.

        Args:
            workload: a `prepare.Workload`, or one example: what the model is called with, so formatted if
                your code formats it, as by `workload.each(pipeline.format)`.

        Raises:
            GuardError: a module differs from torch's own, with `on_difference="raise"`.
            DriftError: the model has drifted.
        """
        with PROCESS_STATE, torch.no_grad():
            seconds, self._seconds = self._seconds, math.inf
            try:
                for _, example in sizes_of(workload):
                    call = call_of(example)
                    with unchanged(self._model, call.args, call.kwargs) as self._state:
                        self._model(*call.args, **call.kwargs)
            finally:
                self._seconds, self._state = seconds, None

    def find_drift(self) -> list[Drift]:
        drifts = super().find_drift()
        if self._optimizer is not None:
            drifts += optimizer_drift(self._model, self._optimizer)
        return drifts

    def remove(self) -> None:
        """Stop looking, after a last comparison of what was recorded."""
        self._end()
        self._compare_recorded()

    def __repr__(self) -> str:
        if not self.watched:
            why = "no module is changed, or their weights are sharded"
            return f"guard of {type(self._model).__name__}: it looks for drift alone: {why}"
        kinds: dict[str, int] = {}
        for name, kind in self.watched.items():
            if name not in self._excluded:
                kinds[kind] = kinds.get(kind, 0) + 1
        what = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing"
        limits = f"{self._seconds:g} s and {size(self._max_bytes)} in each"
        used = f"{plural(self.looks, 'look')} in {self.seconds_used:.3g} s"
        lines = [
            f"guard of {type(self._model).__name__}: {what}",
            f"  serving   all at the first call of each shape, layout, dtype and mode; at most {limits}",
            f"  training  each once in {self._turn()}",
            f"  then      {_ACTION[self._response.action]}",
            f"  so far    {used}, {plural(len(self.differences), 'difference')}",
        ]
        if any(is_compiled(module) for module in self._model.modules()):
            lines.append("  compiled  modules are looked at as a whole, and in serving only")
        if "fuse_conv_bn" in self._pipeline.steps:
            text = "are compared with torch's of the same fused weights: their norms are gone"
            lines.append(f"  fused     convolutions {text}")
        lines += [
            f"  left out  {name or 'the model'}: {why}" for name, why in self.left_out.items()
        ]
        return "\n".join(lines)

    def _turn(self) -> str:
        """Return in how many training steps every module is looked at once, in words."""
        steps = self._turns.steps_of_all(len(self._names()))
        count = plural(self._every, "step")
        if steps > self._every:
            count = f"about {round(steps, 2 - len(str(steps))):,} steps, not {self._every:,}"
        limit = (
            f"in at most {100 * self._share:g} % of" if self._share < 1 else "without a limit of"
        )
        return f"{count}, {limit} the time"

    # ------------------------------------------------------------------------------- the model's calls

    def _watch(self, plan: Plan) -> None:
        self.watched = watched_modules(self._model, self._originals, plan)
        modules = dict(self._model.named_modules())
        self.left_out = {n: why for n in self.watched if (why := obstacle(modules[n]))}
        self._excluded = set(self.left_out)
        # In an order without a meaning: so the time of the first looks tells that of the others.
        self._order = sorted(self.watched, key=lambda name: zlib.crc32(name.encode()))

    def _end(self) -> None:
        self._end_look()
        self._detach()

    def before(self, args: Any, kwargs: Any) -> None:
        """Begin to look if this call is due; else cost next to nothing."""
        model = self._model
        key = key_of(model, args, kwargs)
        if key in self._known:
            return
        if self._thread == threading.get_ident():  # a look runs the model itself
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._note("the model", "its calls are captured in a CUDA graph, which runs no Python")
            return
        if model.training and torch.is_grad_enabled():
            self._before_training(key, args, kwargs)
        else:
            self._begin(key, args, kwargs, self._names(), self._look_at_served)

    def after(self, output: Any, *, raised: bool) -> Any:
        """End a look, at the end of the call in which it began; return the output to use."""
        if self._thread != threading.get_ident() or self._current is None:
            return output
        watcher, key, _ = self._current
        try:
            output = watcher.end(output, raised=raised)
            if not raised and key is not None and not self._is_late:
                if len(self._known) >= _KEYS:
                    self._known.clear()
                self._known.add(key)
                self._seen.pop(key, None)
        finally:
            for name in watcher.refused:
                self._note(name, f"its call needs more than {size(self._max_bytes)}")
            self._end_look()
        return output

    def _names(self) -> list[str]:
        return [name for name in self._order if name not in self._excluded]

    def _begin(
        self, key: Hashable | None, args: Any, kwargs: Any, names: list[str], look: Any
    ) -> None:
        with ExitStack() as stack:
            # A deferred interrupt is raised when the look has ended, or in the next module.
            stack.enter_context(held_interrupts(may_hang=True))
            # One look at a time: it changes how modules are called.
            stack.enter_context(PROCESS_STATE)
            if key in self._known:  # by another thread meanwhile
                return
            if key is not None:
                raise_drift(self.find_drift())
                raise_problems(DriftError, self._modes())
            watcher = Watcher(
                self._model,
                CallInterceptor(),
                wanted=names,
                look=look,
                max_bytes=self._max_bytes,
                interrupted=self._end_look,
            )
            self._current = watcher, key, time.monotonic() + self._seconds
            self._is_late, self._thread = False, threading.get_ident()
            stack.callback(self._forget)
            if not is_compiled(self._model):
                hook: Any = self._model.register_forward_hook(
                    lambda *given: self._after_hook(hook, given[-1]), always_call=True
                )
                stack.callback(hook.remove)
            watcher.begin(args, kwargs)
            stack.callback(watcher.end, None, raised=True)
            self._look = stack.pop_all()

    def _after_hook(self, hook: Any, output: Any) -> Any:
        if self._thread == threading.get_ident():
            hook.remove()
            output = self.after(output, raised=output is None)
        return output

    def _end_look(self) -> None:
        if self._thread == threading.get_ident():
            look, self._look = self._look, ExitStack()
            look.close()

    def _forget(self) -> None:
        self._thread = self._current = None

    def _modes(self) -> Iterator[Problem]:
        """Yield the modules in train mode of a model that serves in eval mode."""
        if self._model.training or torch.is_grad_enabled():
            return
        for name, module in self._model.named_modules():
            if module.training and name not in self._other_mode:
                yield Problem(
                    name, "is in train mode in a model in eval mode", "call eval() of the model"
                )

    # ---------------------------------------------------------------------------------------- serving

    def _look_at_served(self, call: RecordedCall, module: nn.Module, output: Any) -> Any:
        assert self._current is not None
        _, key, end = self._current
        seen = self._seen.setdefault(key, set())
        inner = call.module, key_of(module, call.arguments.args, call.arguments.kwargs)
        if inner in seen or call.module in self._excluded:
            return output
        if time.monotonic() > end:
            self._is_late = True
            return output
        amp = autocast_of(module, call)
        found = self._compared(call, module, amp, backward=False)
        if found and self._act(found, call, module) and not torch.is_grad_enabled():
            arguments = call.arguments
            output = module(*arguments.args, **arguments.kwargs)
            if self._current and not call.children:
                again = replace(call, outputs=output)
                if found := self._compared(again, module, amp, backward=False):
                    self._act(found, again, module)  # a hook for example is not torch's own
        seen.add(inner)
        return output

    # --------------------------------------------------------------------------------------- training

    def _before_training(self, key: Hashable, args: Any, kwargs: Any) -> None:
        self._compare_recorded()
        self._steps += 1
        if self._steps % self._every == 0:
            raise_drift(self.find_drift())
        names = [] if is_compiled(self._model) else self._names()
        if chosen := self._turns.next(key, names) if names else []:
            self._begin(None, args, kwargs, chosen, self._record_trained)

    def _record_trained(self, call: RecordedCall, module: nn.Module, output: Any) -> Any:
        if not is_compiled(module) and all(call.module != c.module for c, _, _ in self._recorded):
            kept = replace(call, children=list(call.children))
            self._recorded.append((kept, module, autocast_of(module, call)))
        return output

    def _compare_recorded(self) -> None:
        """Compare what a training step recorded, when its gradients have arrived."""
        recorded, self._recorded = self._recorded, []
        for call, module, amp in recorded:
            with self._alone():
                start = time.perf_counter()
                found = self._compared(call, module, amp, backward=True)
                self._turns.add(time.perf_counter() - start)
                if found:
                    self._act(found, call, module)
        is_measured = self._steps > 1 and self.looks >= min(_TOLD, len(self.watched))
        if is_measured and not self._is_told:
            self._is_told = True
            _log.info("guard: in training each module is looked at once in %s", self._turn())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with PROCESS_STATE, CallInterceptor() as interceptor:
            self._interceptor, self._thread = interceptor, threading.get_ident()
            try:
                yield
            finally:
                self._thread = None

    # --------------------------------------------------------------------------------- what was found

    def _compared(
        self, call: RecordedCall, module: nn.Module, amp: str, *, backward: bool
    ) -> WrongModule | None:
        """Return the difference of one call from torch's own; None if there is none, or none can be told."""
        if why := too_large(call, module, self._max_bytes):
            self._note(call.module, why)
            return None
        start = time.perf_counter()
        interceptor = self._current[0].interceptor if self._current else self._interceptor
        try:
            with torch.inference_mode(mode=False):
                original = self._originals.of(call.module, module)
                alone = relative(call, module, self._model)
                text = difference(alone, module, original, interceptor, amp=amp, backward=backward)
        except Exception as error:  # the module's code may depend on the code around it
            self._note(call.module, first_line(error))
            self._excluded.add(call.module)
            return None
        finally:
            self.seconds_used += time.perf_counter() - start
        self.looks += 1
        where = call.module or type(self._model).__name__
        return (
            WrongModule(where, text, describe_call(module, call.arguments, amp)) if text else None
        )

    def _note(self, name: str, why: str) -> None:
        if name not in self.left_out:
            self.left_out[name] = why
            _log.info("guard: %s is left out: %s", name or "the model", why)

    def _act(self, found: WrongModule, call: RecordedCall, module: nn.Module) -> bool:
        """Raise, warn, or put torch's own class back; return whether that was done."""
        was_compiled = is_compiled(module)
        try:
            return self._response.act(found, call, module)
        finally:  # the warning may be an error
            if self.differences and self.differences[-1].done:
                if self._state is not None:  # what was put back stays
                    self._state.forget(module, self._model)
                self.record(self._model)
                if was_compiled:  # what is in it is looked at from now on
                    self._watch(self._pipeline.plan(self._model, known_issues="ignore"))
                if was_compiled and module is self._model:
                    self._detach = attach(self, self._model)


def _limits(seconds: float, max_bytes: int, share: float) -> Iterator[Problem]:
    if not share > 0:
        yield Problem("share", f"{share} is not above 0", "give a part of the time, as in 0.01")
    if not seconds > 0:
        yield Problem(
            "seconds", f"{seconds} is not above 0", "give the seconds that a call may take"
        )
    if max_bytes < 1:
        yield Problem("max_bytes", f"{max_bytes} is not at least 1", "give a number of bytes")
