"""Choose the rewrites of a model by timing: each call of its example against torch's own convolution."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from prepare.core.forward.call import arguments
from prepare.core.forward.torch_state import Amp, autocast, device_of
from prepare.core.forward.unchanged import unchanged
from prepare.core.model.module_kinds import reads_contiguous
from prepare.core.model.module_tree import clone_of, copy_tree
from prepare.core.model.tensors import is_expanded
from prepare.core.utils.process_state import interruptible
from prepare.core.utils.text import first_line, plural
from prepare.stages.bench import statistics

if TYPE_CHECKING:
    from prepare.steps.repairs.rewrites import Rewrite

# The whole choice may take this many seconds, and this many calls of the model: a tenth of a run or less.
_SECONDS, _CALLS = 1.0, 4
# Rounds after which a verdict may be settled: three looks share the error.
_LOOKS = (7, 14, 28)
_CONTROL = 0.95
_CONFIDENCE = statistics.bonferroni(_CONTROL, len(_LOOKS))
# Seconds that one timing takes at least, so that the clock is exact: several calls if they are shorter.
_SHORTEST = 0.0005
# A rewrite has to need less than this part of the time.
_LEAST = 0.97
# After these rounds timing ends if nothing was faster in any of them, or if the time is over and nothing is
# much faster.
_FEW, _MUCH = 3, 0.9


class _Like(NamedTuple):
    """The sizes of the input of a call, from which a tensor is made to time it.

    All inputs at once are larger than what a forward needs. A tensor on the meta device would do too, but
    what is allocated between two activations keeps malloc from using their memory again.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def make(self) -> Tensor:
        like: Any = {"dtype": self.dtype, "device": self.device}
        x = torch.empty_strided(self.shape, self.strides, **like)
        return (torch.empty(self.shape, **like) if is_expanded(x) else x).normal_()


@dataclass
class _Recorded:
    """A call of a convolution: its input, how often it came, and the seconds that it took."""

    x: _Like
    needs_grad: bool
    times: int = 0
    seconds: float = 0.0


@dataclass
class RewriteChoice:
    """The chosen rewrites, `{rewrite: names of modules}`, what they save, and how long it took.

    `phrases` counts the convolutions by what they run as.
    """

    names: dict[str, list[str]] = field(default_factory=dict)
    phrases: Counter[str] = field(default_factory=Counter)
    before: float = 0.0
    after: float = 0.0
    timed: int = 0
    untimed: int = 0
    seconds: float = 0.0
    failure: str = ""

    def text(self) -> str:
        """Return `1 convolution runs as a product: 6.5x faster there (3 timed in 0.8 s)`."""
        runs = ", ".join(
            f"{plural(count, 'convolution')} {'runs' if count == 1 else 'run'} as {phrase}"
            for phrase, count in self.phrases.items()
        )
        faster = f": {self.before / self.after:.1f}x faster there" if self.after else ""
        left = f", {self.untimed} not in the time for it" if self.untimed else ""
        took = f" ({self.timed} timed in {self.seconds:.1f} s{left})"
        return (runs + faster if runs else "no convolution is faster as another operation") + took


def choose_rewrites(
    model: nn.Module,
    example: Any,
    tried: Mapping[str, list[Rewrite]],
    formats: Mapping[int, str],
    *,
    backward: bool,
    amp: Amp,
) -> RewriteChoice:
    """Return the rewrites that are faster beyond noise for the calls of `example`; changes no module.

    `model` is prepared but for this step. Calls of the same sizes of the same kind of convolution are timed
    once; the longest come first, until the time is over.
    """
    start = time.perf_counter()
    if not tried:
        return RewriteChoice()
    device = device_of([model])
    if device.type == "meta":
        named = ", ".join(tried)
        return RewriteChoice(
            failure=f"nothing is timed on the meta device; a run would try {named}"
        )
    with unchanged(model, *arguments(example)):
        try:
            calls, seconds = _record(model, example, tried, backward=backward, amp=amp)
        except Exception as error:  # the run says where the model fails
            return RewriteChoice(failure=f"the example cannot be run: {first_line(error)}")
        limit = start + _SECONDS + _CALLS * seconds
        timer, choice = _Timer(formats, limit, backward, amp), RewriteChoice()
        order = sorted(calls, key=lambda name: -sum(c.seconds * c.times for c in calls[name]))
        for name in order:
            module = model.get_submodule(name)
            best = timer.best_of(module, calls[name], tried[name])
            if best is None:
                choice.untimed += 1
                continue
            choice.timed += 1
            rewrite, before, after = best
            if rewrite is not None:
                choice.names.setdefault(rewrite.name, []).append(name)
                choice.phrases[rewrite.phrase] += 1
                choice.before += before
                choice.after += after
    choice.seconds = time.perf_counter() - start
    return choice


def _record(
    model: nn.Module, example: Any, names: Mapping[str, Any], *, backward: bool, amp: Amp
) -> tuple[dict[str, list[_Recorded]], float]:
    """Return the calls of the named convolutions in a call of the model, and its seconds."""
    calls: dict[str, dict[Any, _Recorded]] = {}
    args, kwargs = arguments(example)
    # malloc keeps what activations of before took, and may not find room for those of this call between it.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    cast = autocast(amp, device_of([model]))
    with _recording(model, names, calls), torch.set_grad_enabled(backward), cast:
        start = time.perf_counter()
        interruptible(model, *args, **kwargs)
        seconds = time.perf_counter() - start
    return {name: list(by_kind.values()) for name, by_kind in calls.items()}, seconds


@contextmanager
def _recording(model: nn.Module, names: Mapping[str, Any], calls: dict[str, Any]) -> Iterator[None]:
    modules = {name: model.get_submodule(name) for name in names}

    def recorder(name: str, module: Any) -> Any:
        run = module._conv_forward

        def recorded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            key = (tuple(x.shape), x.stride(), x.dtype, x.requires_grad)
            by_kind = calls.setdefault(name, {})
            if key not in by_kind:
                alike = _Like(tuple(x.shape), x.stride(), x.dtype, x.device)
                by_kind[key] = _Recorded(alike, x.requires_grad)
            start = time.perf_counter()
            y = run(x, weight, bias)
            _wait(x.device)
            by_kind[key].times += 1
            by_kind[key].seconds = time.perf_counter() - start
            return y

        return recorded

    for name, module in modules.items():
        vars(module)["_conv_forward"] = recorder(name, module)
    try:
        yield
    finally:
        for module in modules.values():
            del vars(module)["_conv_forward"]


@dataclass
class _Timer:
    """Times the calls of convolutions, each of the same kind once, until `limit` on the clock."""

    formats: Mapping[int, str]
    limit: float
    backward: bool
    amp: Amp
    known: dict[Any, tuple[float, dict[str, float]]] = field(default_factory=dict)

    def best_of(
        self, module: nn.Module, calls: list[_Recorded], rewrites: list[Rewrite]
    ) -> tuple[Rewrite | None, float, float] | None:
        """Return the best rewrite or None, with the seconds before and after; None if no time is left."""
        totals = dict.fromkeys(rewrites, 0.0)
        before = 0.0
        for call in calls:
            key = (*map(str, _signature(module, call)), *(each.name for each in rewrites))
            if key not in self.known:
                if time.perf_counter() > self.limit:
                    return None
                self.known[key] = self.timed(module, call, rewrites)
            seconds, ratios = self.known[key]
            before += call.times * seconds
            for rewrite in rewrites:
                totals[rewrite] += call.times * seconds * ratios[rewrite.name]
        best = min(rewrites, key=totals.__getitem__)
        is_faster = totals[best] < _LEAST * before
        return (best if is_faster else None), before, totals[best]

    def timed(
        self, module: nn.Module, call: _Recorded, rewrites: list[Rewrite]
    ) -> tuple[float, dict[str, float]]:
        """Return the seconds of torch's convolution, and the ratio of each rewrite: 1 if none is shown."""
        x = call.x.make()
        variants = {"": _copied(module, None, self.formats)}
        ratios = dict.fromkeys((rewrite.name for rewrite in rewrites), 1.0)
        for rewrite in rewrites:
            copied = _copied(module, rewrite, self.formats)
            with torch.no_grad(), autocast(self.amp, x.device):
                if copied.served(x, copied.weight, copied.bias) is not None:
                    variants[rewrite.name] = copied
        if len(variants) == 1:
            return call.seconds, ratios
        run = {
            name: self._caller(each, x, needs_grad=call.needs_grad)
            for name, each in variants.items()
        }
        samples: dict[str, list[float]] = {name: [] for name in run}
        for each in run.values():
            each()
        # Of one thread the processor's time, in which other processes do not count.
        alone = x.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        repeats = max(1, round(_SHORTEST / max(_seconds(run[""], 1, clock), 1e-7)))
        rounds = statistics.Rounds(clock)
        while rounds.count < _LOOKS[-1]:
            for name in rounds.turns([*run]):
                samples[name].append(_seconds(run[name], repeats, clock))
            is_late = time.perf_counter() > self.limit
            if len(samples[""]) >= _FEW and _is_hopeless(samples, is_late=is_late):
                break
            # The last look, when the time is over, takes the place of those that would have followed.
            is_look = len(samples[""]) in _LOOKS or (is_late and len(samples[""]) > _LOOKS[0])
            if is_look and ("unclear" not in _verdicts(samples, ratios) or is_late):
                break
        return statistics.estimate(samples[""], _CONFIDENCE).value, ratios

    def _caller(self, module: Any, x: Tensor, *, needs_grad: bool) -> Callable[[], None]:
        """Return a function that runs one call, with its backward in training."""
        backward = self.backward
        x = x.detach().requires_grad_(needs_grad and backward)
        # As leaves: a weight that a hook computes belongs to the graph of a call that is over.
        given = [module.weight, *([] if module.bias is None else [module.bias])]
        weights = [each.detach().requires_grad_(each.requires_grad and backward) for each in given]
        weight, bias = (*weights, None)[:2]
        leaves = [each for each in (x, *weights) if each.requires_grad]
        grad: list[Tensor] = []

        def run() -> None:
            with torch.set_grad_enabled(backward):
                with autocast(self.amp, x.device):
                    y = module._conv_forward(x, weight, bias)
                if backward and leaves:
                    grad[:] = grad or [torch.randn_like(y)]
                    torch.autograd.grad(y, leaves, grad[0])
            _wait(x.device)

        return run


def _signature(module: Any, call: _Recorded) -> tuple[Any, ...]:
    """Return what decides on the time of a call: two calls with the same are timed once."""
    x, weight = call.x, module.weight
    return (
        type(module), module.extra_repr(), weight.stride(), weight.dtype, weight.requires_grad,
        x.shape, x.stride(), x.dtype, call.needs_grad,
    )  # fmt: skip


def _is_hopeless(samples: Mapping[str, list[float]], *, is_late: bool) -> bool:
    """Return whether no rewrite was ever faster; if it is late, whether none is much faster."""
    pairs = [statistics.ratios(times, samples[""]) for name, times in samples.items() if name]
    if is_late and len(samples[""]) < _LOOKS[0]:
        return not any(median(each) < _MUCH for each in pairs)
    return all(min(each) >= 1 for each in pairs)


def _seconds(run: Callable[[], None], repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        run()
    return (clock() - start) / repeats


def _verdicts(samples: Mapping[str, list[float]], ratios: dict[str, float]) -> set[str]:
    """Write the ratios that are shown into `ratios`; return all verdicts.

    The noise is that of the convolution against itself, a round later.
    """
    base = samples[""]
    noise = statistics.noise(statistics.ratio(base[1:], base[:-1], _CONTROL))
    measured = {n: statistics.ratio(samples[n], base, _CONFIDENCE) for n in ratios if n in samples}
    verdicts = {name: statistics.verdict(each, noise) for name, each in measured.items()}
    shown = {
        name: each.value
        for name, each in measured.items()
        if verdicts[name] in ("faster", "slower")
    }
    ratios.update(dict.fromkeys(measured, 1.0) | shown)
    return {*verdicts.values()}


def _copied(module: nn.Module, rewrite: Rewrite | None, formats: Mapping[int, str]) -> Any:
    """Return a copy of a convolution with its own tensors, rewritten, in the layout that this reads."""
    copied: Any = copy_tree(module, clone_of)
    if rewrite is not None:
        if not rewrite.is_repaired(copied):
            rewrite.repair(copied, formats)
        if reads_contiguous(copied) and "weight" in copied._parameters:
            copied.weight.data = copied.weight.data.contiguous()
    return copied


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
