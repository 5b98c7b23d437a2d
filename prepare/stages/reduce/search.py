"""Find a call of a model that fails by itself, and make it simpler while it still fails in the same way."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from prepare.core.forward.explain_error import explained
from prepare.core.model.known_issues import ONLY, standing
from prepare.core.utils.child_process import HANGS as HUNG
from prepare.core.utils.child_process import Worker
from prepare.stages.reduce.calls import collect_calls
from prepare.stages.reduce.records import CRASHES, FAULTS, HANGS, SLOW, WRONG, ModuleCall, Reduction
from prepare.stages.reduce.script import INVALID, answer, run_script, script_of

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline

# Seconds of one script.
_SECONDS = 10.0
_REPEATS = 20
# A variant whose error is smaller than that of the first call by more than this factor has another fault.
_SMALLER = 5.0
# The gradients of a norm over fewer numbers are all rounding: two of them always become 1 and -1.
_LEAST_OF_NORM = 8
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
# The arguments that count the channels of the input.
_CHANNELS = ("in_channels", "num_features", "num_channels", "num_parameters")
Trial = Callable[[ModuleCall], tuple[str, str]]


class WorkerTrials(Worker):
    """Run scripts in a child process, so that one that crashes or hangs ends no other."""

    def __init__(self) -> None:
        super().__init__(f"{answer.__module__}:{answer.__name__}")
        self._is_spoiled = False

    def __call__(self, call: ModuleCall) -> tuple[str, str]:
        """Return the outcome of a call, and what its script said."""
        request = {"script": script_of(call), "dtype": call.dtype, "allowed": call.limit}
        fresh = call.slow or self._is_spoiled
        found, death = self.ask(request, seconds=_SECONDS, fresh=fresh)
        outcome, text = found or (HANGS if death == HUNG else CRASHES, f"its process {death}")
        self._is_spoiled = outcome in FAULTS  # its memory may be overwritten
        return outcome, text


def trial_here(call: ModuleCall) -> tuple[str, str]:
    """Run the script of a call in this process."""
    return run_script(script_of(call), dtype=call.dtype, allowed=call.limit)


def reduce(
    model: nn.Module,
    batch: Any,
    *,
    pipeline: Pipeline | None = None,
    culprit: str = "",
    slow: bool = False,
    training: bool = True,
    seconds: float = 60.0,
    isolated: bool = True,
) -> Reduction | None:
    """Find the first module of torch that is wrong by itself on its input, and make the call small.

    One forward of the model gives the shape, memory format, dtype, mean and deviation of the input of each
    module of torch.nn. Each becomes a script that compares forward and backward with float64, or times them.
    The first that fails is shrunk (samples, pixels, channels, options, values, dtype) while it still fails.

    Args:
        model: the prepared model; it is not changed.
        batch: a tensor, a tuple of positional or a mapping of named arguments, or an Example.
        pipeline: the pipeline that prepared it; it formats the batch.
        culprit: the module to try first: `Verification.culprit`.
        slow: look for a memory format that is slow, instead of wrong results.
        training: run the modules in training mode.
        seconds: no script begins after this time.
        isolated: run each script in a process of its own: kernels may crash, hang or overwrite memory.

    Return None if no module fails by itself: then the fault needs the real values, or is in the code
    between the modules, or in a module that is not torch's.

    Raises:
        ModelError: the forward raised.
    """
    try:
        calls = collect_calls(model, batch, pipeline=pipeline, training=training)
    except Exception as error:  # the model's own code
        raise explained(model, error) from error
    if slow:
        calls = [replace(call, slow=True) for call in calls if call.format != "contiguous"]
    calls.sort(key=lambda call: call.name != culprit)  # the others keep their order
    with WorkerTrials() if isolated else nullcontext(trial_here) as trial:
        return _reduced(calls, trial, time.perf_counter() + seconds)


def _reduced(calls: Iterable[ModuleCall], trial: Trial, end: float) -> Reduction | None:
    """Return the reduction of the first call that fails; None if none fails, or no time is left."""
    for first in calls:
        fault = ""
        for call in _first_tries(first):
            if call.limit > first.limit and fault != INVALID:
                continue  # only if rounding might explain the error
            fault, text = trial(call)
            if fault in FAULTS:
                best, text = _shrunk(call, fault, text, trial, end)
                return Reduction(
                    script=script_of(best),
                    fault=fault,
                    module=best.name,
                    call=best,
                    text=text,
                    known=known_twin(best, fault),
                )
            if time.perf_counter() > end:
                return None
    return None


def _first_tries(call: ModuleCall) -> Iterable[ModuleCall]:
    """Yield a call, then with larger and smaller errors allowed, then repeated."""
    yield call
    if call.slow:
        return
    for factor in (10, 100):
        yield replace(call, allowed=call.limit * factor)
    if call.dtype == "float32":
        yield replace(call, allowed=call.limit / 10)
    yield replace(call, repeats=_REPEATS)


def _shrunk(
    call: ModuleCall, fault: str, text: str, trial: Trial, end: float
) -> tuple[ModuleCall, str]:
    """Take any simpler variant that fails in the same way, until there is none.

    A fault of the memory format stays one: each variant must be right in the contiguous format.
    """

    def is_right_contiguous(call: ModuleCall) -> bool:
        return trial(replace(call, format="contiguous"))[0] not in FAULTS

    of_format = not call.slow and call.format != "contiguous" and is_right_contiguous(call)
    tried, least = {call}, _error(text) / _SMALLER
    while True:
        for variant in variants(call):
            if variant in tried or (variant.size >= call.size and not _is_plainer(variant, call)):
                continue
            if of_format and variant.format == "contiguous":
                continue
            if time.perf_counter() > end:
                return call, text
            tried.add(variant)
            found, said = trial(variant)
            if found != fault or _error(said) < least:  # a smaller error is another, as of rounding
                continue
            if not of_format or is_right_contiguous(variant):
                call, text = variant, said
                break
        else:
            return call, text


def variants(call: ModuleCall) -> Iterator[ModuleCall]:
    """Yield simpler variants, the boldest first; a variant may be one that torch refuses."""
    for simpler in (*_plain_values(call), *_plain_modes(call), *_fewer_samples(call),
                    *_fewer_pixels(call), *_fewer_channels(call), *_fewer_options(call)):  # fmt: skip
        if (
            "Norm" not in call.kind
            or math.prod(simpler.shape[2:]) * simpler.shape[0] >= _LEAST_OF_NORM
        ):
            yield simpler


def _plain_values(call: ModuleCall) -> Iterator[ModuleCall]:
    if call.mean or call.deviation != 1.0:
        yield replace(call, mean=0.0, deviation=1.0)
        if call.mean and call.deviation != 1.0:
            yield replace(call, deviation=1.0)
            yield replace(call, mean=0.0)


def _plain_modes(call: ModuleCall) -> Iterator[ModuleCall]:
    if call.repeats > 1:
        yield replace(call, repeats=1)
    if call.backward:
        yield replace(call, backward=False)
    if call.dtype != "float32":
        yield replace(call, dtype="float32", allowed=None)
    if call.format != "contiguous" and not call.slow:
        yield replace(call, format="contiguous")
    if call.allowed is not None:
        yield replace(call, allowed=None)


def _smaller(size: int) -> list[int]:
    return [each for each in dict.fromkeys((*_SIZES, size // 2)) if 0 < each < size]


def _fewer_samples(call: ModuleCall) -> Iterator[ModuleCall]:
    for size in _smaller(call.shape[0]):
        yield replace(call, shape=(size, *call.shape[1:]))


def _fewer_pixels(call: ModuleCall) -> Iterator[ModuleCall]:
    spatial = call.shape[2:]
    if not spatial:
        return
    for size in _smaller(max(spatial)):
        yield _resized(call, tuple(min(size, each) for each in spatial))
    for index, length in enumerate(spatial):
        for size in _smaller(length):
            yield _resized(call, (*spatial[:index], size, *spatial[index + 1 :]))


def _resized(call: ModuleCall, spatial: tuple[int, ...]) -> ModuleCall:
    shape = (*call.shape[:2], *spatial)
    return _with(replace(call, shape=shape), normalized_shape=_normalized(call, shape))


def _normalized(call: ModuleCall, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that a LayerNorm normalizes after its input has changed."""
    before = call.value("normalized_shape")
    return shape[-len(before) :] if before else None


def _fewer_channels(call: ModuleCall) -> Iterator[ModuleCall]:
    if len(call.shape) < 2:
        return
    channels, groups = call.shape[1], call.value("groups", 1)
    depthwise = groups == channels > 1
    for size in _smaller(channels):
        shape = (call.shape[0], size, *call.shape[2:])
        changes: dict[str, Any] = {key: size for key in _CHANNELS if call.value(key) == channels}
        if depthwise:
            changes |= {
                "groups": size,
                "out_channels": size * call.value("out_channels") // channels,
            }
        changes["normalized_shape"] = _normalized(call, shape)
        yield _with(replace(call, shape=shape), **changes)
    if call.value("out_channels") and not depthwise:
        for size in _smaller(call.value("out_channels")):
            yield _with(call, out_channels=size)
    if not depthwise:
        for size in _smaller(groups):
            yield _with(call, groups=size)
    if call.value("num_groups"):
        for size in _smaller(call.value("num_groups")):
            yield _with(call, num_groups=size)


def _fewer_options(call: ModuleCall) -> Iterator[ModuleCall]:
    for name, _ in call.options:
        yield replace(call, options=tuple(pair for pair in call.options if pair[0] != name))
    for name in ("kernel_size", "stride", "dilation", "padding"):
        value = call.value(name)
        if isinstance(value, tuple):
            yield _with(call, **{name: max(value)})
        elif isinstance(value, int) and not isinstance(value, bool):
            for size in _smaller(value):
                yield _with(call, **{name: size})


def _with(call: ModuleCall, **changes: Any) -> ModuleCall:
    """Return the call with other arguments; None changes nothing."""

    def changed(pairs: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
        given = {key: value for key, value in changes.items() if value is not None}
        return tuple((key, given.get(key, value)) for key, value in pairs)

    return replace(call, arguments=changed(call.arguments), options=changed(call.options))


def _error(text: str) -> float:
    """Parse the error that a script printed, capped at 1; 1 if there is none, or it is not finite."""
    found = re.search(r"error (\S+),", text)
    error = float(found[1]) if found else 1.0
    return min(error, 1.0) if math.isfinite(error) else 1.0


def _is_plainer(variant: ModuleCall, call: ModuleCall) -> bool:
    values = [each.mean == 0 and each.deviation == 1 for each in (variant, call)]
    return values > values[::-1] or (variant.allowed is None and call.allowed is not None)


def known_twin(call: ModuleCall, fault: str) -> str:
    """Return the name of a known issue of this operation, format and dtype; empty if none is known."""
    module = getattr(nn, call.kind)(**dict(call.arguments + call.options))
    for issue in standing(call.device):
        if (
            issue.effect == ("slow" if fault == SLOW else WRONG)
            and issue.concerns(call.kind, [call.format], [call.dtype])
            and ONLY[issue.only](module)
        ):
            return issue.name
    return ""
