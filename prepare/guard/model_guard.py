"""Watch a prepared model: decide at each call of a module whether to look, and act on a difference."""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from prepare.core.forward.call import Call, call_of
from prepare.core.forward.compiled import is_compiled
from prepare.core.forward.unchanged import ModelState, unchanged, without_gradients
from prepare.core.forward.workload import Workload, sizes_of
from prepare.core.utils.text import first_line, size
from prepare.errors import DriftError, Problem, raise_problems
from prepare.guard.apart import apart, can_look
from prepare.guard.compare import autocast_of, changed_by_hooks, difference, run_again
from prepare.guard.originals import Originals, obstacle, watched_modules
from prepare.guard.respond import OnDifference, Response, WrongModule, check_options
from prepare.guard.text import describe_call, text_of, turn_of
from prepare.guard.turns import Turns
from prepare.guard.watch import Watched, WatchedCall, key_of
from prepare.pipeline.drift import Drift, Guard, optimizer_drift, plan_drift, raise_drift
from prepare.pipeline.optimizer_state import unwrap_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from torch.optim import Optimizer


_log = logging.getLogger(__name__)
# The most keys of a module that are remembered; a key of before is then looked at again.
_KEYS = 1 << 16
# The looks at one key that may fail before it is left alone.
_TRIES = 3
# The looks after which it is said how long those of all modules take.
_TOLD = 20
# The number and the end of the looks of a call of a module alone.
_NO_CALL = -1, math.inf


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
        pipeline: Any,
        *,
        every: int,
        on_difference: OnDifference = "raise",
        optimizer: Optimizer | None = None,
        seconds: float = 10.0,
        max_bytes: int = 1 << 30,
        share: float = 0.01,
        folder: str | Path | None = None,
    ) -> None:
        check_options(on_difference, seconds, max_bytes, share)
        raise_drift(plan_drift(pipeline.plan(model, known_issues="ignore")))
        super().__init__(model, every=every)
        self._model, self._pipeline = model, pipeline
        self._optimizer = None if optimizer is None else unwrap_optimizer(optimizer)
        self._seconds, self._max_bytes = seconds, max_bytes
        self._originals = Originals(model, pipeline)
        path = None if folder is None else Path(folder)
        self._response = Response(pipeline, self._originals, on_difference, self._optimizer, path)
        self._other_mode = {n for n, m in model.named_modules() if m.training != model.training}
        self.differences: list[WrongModule] = self._response.differences
        self.looks, self.seconds_used = 0, 0.0
        # By thread and module.
        self.running: dict[tuple[int, str], WatchedCall] = {}
        # Keys of calls of the model, numbered; by thread the number, and when no look begins any more.
        self._known: dict[Hashable, int] = {}
        self._began: dict[int, tuple[int, float]] = {}
        self._turns, self._steps, self._is_told = Turns(every=every, share=share), 0, False
        self._chosen: set[str] = set()
        self._recorded: list[WatchedCall] = []
        self._share = share
        # What `look` restores.
        self._state: ModelState | None = None
        self._hooked: dict[str, Watched] = {}
        self._watch()

    def __call__(self) -> None:
        """Count a training step, and compare what the forward recorded; on every `every`-th, look for drift.

        Raises:
            DriftError: the model has drifted.
            GuardError: a module differs from torch's own, with `on_difference="raise"`.
        """
        self._compare_recorded()
        super().__call__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        self.remove() if kind is None else self._detach()

    def look(self, workload: Workload | Any) -> None:
        """Look now at all modules in each size of a workload, so that in serving its calls cost a look-up.

        The model runs once in each size as it would serve: without gradients, unless it raises so, in its
        mode and under the autocast of the caller. The option `seconds` does not bound it.

        Args:
            workload: a `prepare.Workload`, or one example: what the model is called with, so formatted if
                your code formats it, as by `workload.each(pipeline.format)`.

        Raises:
            GuardError: a module differs from torch's own, with `on_difference="raise"`.
            DriftError: the model has drifted.
        """
        seconds, self._seconds = self._seconds, math.inf
        try:
            for _, example in sizes_of(workload):
                without_gradients(partial(self._run, call_of(example)))
        finally:
            self._seconds, self._state = seconds, None

    def _run(self, call: Call) -> None:
        with unchanged(self._model, call.args, call.kwargs) as self._state:
            self._model(*call.args, **call.kwargs)

    def find_drift(self) -> list[Drift]:
        drifts = super().find_drift()
        if self._optimizer is not None:
            drifts += optimizer_drift(self._model, self._optimizer)
        return drifts

    def remove(self) -> None:
        """Stop looking, after a last comparison of what was recorded."""
        self._detach()
        self._compare_recorded()

    def __repr__(self) -> str:
        return text_of(self)

    # --------------------------------------------------------------------------------- what is watched

    def _watch(self) -> None:
        """Put hooks on the modules that the pipeline changed, and on the model."""
        plan = self._pipeline.plan(self._model, known_issues="ignore")
        self.watched = watched_modules(self._model, plan)
        self.left_out: dict[str, str] = {}
        self._detach()
        self._hooked = {}
        for name, module in self._model.named_modules():
            if name and name not in self.watched:
                continue
            watched = self._hooked[name] = Watched(name, module, self.watched.get(name, ""))
            if watched.kind and (why := obstacle(module)):
                self._note(watched, why)
                watched.why = why
            watched.attach(self)

    def _detach(self) -> None:
        for watched in self._hooked.values():
            watched.detach()

    def _looked_at(self) -> list[Watched]:
        """Return the modules that can be looked at, in an order without a meaning.

        So the time of the first looks tells that of the others.
        """
        found = (w for w in self._hooked.values() if w.kind and not w.why)
        return sorted(found, key=lambda watched: zlib.crc32(watched.name.encode()))

    # --------------------------------------------------------------------------------- calls of modules

    def acts(self, watched: Watched) -> Iterator[tuple[Callable[[Any, Any], Any], Any]]:
        """Yield what hooks of a module do before, after its code, and after other hooks; and while what."""
        yield partial(self._before, watched), (True,)
        yield partial(self._first, watched), self.running
        yield partial(self._last, watched), self.running

    def _before(self, watched: Watched, args: Any, kwargs: Any) -> None:
        """Begin a record of this call if it is due; else cost next to nothing."""
        model, thread = self._model, threading.get_ident()
        if self.running:  # a call of before that raised
            self.running.pop((thread, watched.name), None)
        key: tuple[Hashable, ...] = ()
        is_step = model.training and torch.is_grad_enabled() and self._state is None
        if watched.module is model:
            key = (self._begin(args, kwargs, is_step=is_step),)
        if is_step:
            key, is_due = (), watched.name in self._chosen
        elif not watched.kind:
            return
        else:
            if not key:
                key = self._began.get(thread, _NO_CALL)[0], key_of(watched.module, args, kwargs)
            is_due = key not in watched.known
        if is_due and not watched.why:
            self._record(watched, key, Call(args, kwargs))

    def _begin(self, args: Any, kwargs: Any, *, is_step: bool) -> int:
        """Begin a call of the model: look for drift at a new key, choose the modules of a training step."""
        key = key_of(self._model, args, kwargs)
        number = self._known.get(key)
        if number is None or is_step:
            if not can_look(Call(args, kwargs).tensors()):
                return -1
            if is_step:
                self._begin_step(key)
            else:
                raise_drift(self.find_drift())
                raise_problems(DriftError, self._modes())
            if len(self._known) >= _KEYS:
                self._known.clear()
            number = self._known.setdefault(key, len(self._known))
        self._began[threading.get_ident()] = number, time.monotonic() + self._seconds
        return number

    def _begin_step(self, key: Hashable) -> None:
        self._compare_recorded()
        self._steps += 1
        names = [w.name for w in self._looked_at() if w.kind != "compiled"]
        is_looked_at = names and not is_compiled(self._model)
        self._chosen = set(self._turns.next(key, names)) if is_looked_at else set()
        if self._chosen or self._steps % self._every == 0:
            raise_drift(self.find_drift())

    def _modes(self) -> Iterator[Problem]:
        """Yield the modules in train mode of a model that serves in eval mode."""
        if self._model.training or torch.is_grad_enabled():
            return
        for name, module in self._model.named_modules():
            if module.training and name not in self._other_mode:
                wrong = "is in train mode in a model in eval mode"
                yield Problem(name, wrong, "call eval() of the model")

    def _record(self, watched: Watched, key: Hashable, call: Call) -> None:
        thread, tensors = threading.get_ident(), call.tensors()
        is_over = time.monotonic() > self._began.get(thread, _NO_CALL)[1]
        is_recorded = not key and any(watched is other.watched for other in self._recorded)
        if is_over or is_recorded or not can_look(tensors):
            return
        if sum(tensor.nbytes for tensor in tensors) > self._max_bytes:
            self._note(watched, f"its call needs more than {size(self._max_bytes)}")
            watched.known[key] = None
            return
        amp, found = autocast_of(watched.module, tensors), len(self.differences)
        self.running[thread, watched.name] = WatchedCall(watched, key, call, amp, found)

    def _first(self, watched: Watched, _: Any, output: Any) -> Any:
        """Look at what the code of a module returns, in training later; return the output to use, or None."""
        thread = threading.get_ident()
        record = self.running.get((thread, watched.name))
        if record is None:
            return None
        record.end(output)
        if not record.key:
            return None
        if watched.known.setdefault(record.key, record.key) is not record.key:
            del self.running[thread, watched.name]  # another thread looks
            return None
        found = self._compared(record)
        if not found or not self._act(found, record) or torch.is_grad_enabled():
            return None
        output = apart(lambda: run_again(self._original(record), record))
        record.end(output)
        return output

    def _last(self, watched: Watched, args: Any, output: Any) -> None:
        """End the record of a call: look at what later hooks changed, in training with the gradients."""
        record = self.running.pop((threading.get_ident(), watched.name), None)
        if record is None:
            return
        record.follow(args, output)
        if not record.key:
            self._recorded.append(record)
        elif record.has_later_hooks:
            found = self._compared(record)
            if found and self._act(found, record):
                self._act(found, record)  # a hook is not torch's own

    # ------------------------------------------------------------------------------------------- looks

    def _compare_recorded(self) -> None:
        """Compare what a training step recorded, when its gradients have arrived."""
        recorded, self._recorded = self._recorded, []
        for record in recorded:
            found = self._compared(record)
            self._turns.add(record.seconds)
            if found:
                self._act(found, record)
        is_measured = self._steps > 1 and self.looks >= min(_TOLD, len(self.watched))
        if is_measured and not self._is_told:
            self._is_told = True
            _log.info("guard: in training each module is looked at once in %s", turn_of(self))

    def _original(self, record: WatchedCall) -> nn.Module:
        return self._originals.of(record.watched.name, record.before)

    def _difference(self, record: WatchedCall) -> str:
        if (text := changed_by_hooks(record)) or record.is_compared:
            return text
        return difference(record, self._original(record), self._max_bytes)

    def _compared(self, record: WatchedCall) -> WrongModule | None:
        """Return the difference of one call from torch's own; None if there is none, or none can be told."""
        watched, start = record.watched, time.perf_counter()
        # Else modules in it may have changed.
        record.is_exact &= record.found == len(self.differences)
        try:
            text = apart(partial(self._difference, record))
        except Exception as error:  # the module's code may depend on the code around it
            self._failed(record, error)
            return None
        except BaseException:  # an interrupt, which only the wait meets
            watched.known.pop(record.key, None)
            raise
        finally:
            record.seconds = time.perf_counter() - start
            self.seconds_used += record.seconds
        self.left_out.pop(watched.name, None)
        self.looks += bool(text) or not record.is_compared
        record.is_compared = True
        where = watched.name or type(self._model).__name__
        described = describe_call(watched.module, record.call.arguments, record.amp)
        return WrongModule(where, text, described) if text else None

    def _failed(self, record: WatchedCall, error: Exception) -> None:
        watched = record.watched
        self._note(watched, first_line(error))
        tries = watched.tries[record.key] = watched.tries.get(record.key, 0) + 1
        if tries < _TRIES:
            watched.known.pop(record.key, None)

    def _note(self, watched: Watched, why: str) -> None:
        if watched.name not in self.left_out:
            self.left_out[watched.name] = why
            _log.info("guard: %s is left out: %s", watched.name or "the model", why)

    def _act(self, found: WrongModule, record: WatchedCall) -> bool:
        """Raise, warn, or put torch's own class back; return whether that was done."""
        module = record.watched.module
        was_compiled = is_compiled(module)
        try:
            return self._response.act(found, record)
        finally:  # the warning may be an error
            if self.differences and self.differences[-1].done:
                if self._state is not None:  # what was put back stays
                    self._state.forget(module, self._model)
                self.record(self._model)
                if was_compiled:  # what is in it is looked at from now on
                    self._watch()
