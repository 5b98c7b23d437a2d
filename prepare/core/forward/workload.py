"""A workload: example inputs of several sizes, what is called for each, and its results in words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import groupby, pairwise
from operator import le
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from prepare.core.forward.example_input import check_weight
from prepare.core.utils.numbers import is_wide, verdict_text
from prepare.errors import ConfigError, ModelError, Problem

if TYPE_CHECKING:
    import torch

    from prepare.core.forward.call import Call

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ORDER = ("faster", "slower", "no difference", "unclear", "failed", "not compared", "baseline")


@dataclass(frozen=True, slots=True)
class Size:
    """One size of a workload.

    `name` tells it from the others: `batch 4`, `64x64x64`, or the whole shape. `weight` is the number of its
    calls for those of the others; one of 0 is looked at and does not count. `elements` are those of its
    first tensor.
    """

    name: str
    weight: float
    elements: int

    @property
    def key(self) -> str:
        """The name as a part of the key of a figure."""
        return f"at_{self.name.replace(' ', '_')}"


class Workload:
    """Example inputs of several sizes: given in place of one, every size is verified and timed.

    What takes one example takes that with the most weight, the first of several.

    Args:
        examples: each what is given in place of one example: a tensor, a tuple of positional arguments, a
            mapping of named arguments, or an Example.
        weights: the number of calls of each size for those of the others; 1 each by default. A size with the
            weight 0 is verified and timed, and does not count in the whole.

    Raises:
        ConfigError: there is no example, two have the same shapes and dtypes, a weight is negative or
            infinite, all weights are 0, or their number is not that of the examples.

    Examples:
        >>> import torch
        >>> workload = Workload([torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 8, 8)], weights=[10, 1])
        >>> [(size.name, size.weight) for size in workload.sizes]
        [('batch 1', 10.0), ('batch 4', 1.0)]
    """

    def __init__(self, examples: Iterable[Any], *, weights: Iterable[float] | None = None) -> None:
        self.examples = tuple(examples)
        given = (1.0,) * len(self.examples) if weights is None else tuple(weights)
        if problems := list(_problems(len(self.examples), given)):
            raise ConfigError.of(problems)
        tensors = [_call(example).tensors() for example in self.examples]
        names = _names(tensors)
        for index, name in enumerate(names):
            if name in names[:index]:
                wrong = f"has the same shapes as entry {names.index(name)}"
                remedy = "give one of them, with the sum of their weights"
                raise ConfigError(f"input.workload[{index}]", wrong, remedy)
        self.sizes = tuple(
            Size(name, float(weight), each[0].numel() if each else 0)
            for name, weight, each in zip(names, given, tensors, strict=True)
        )

    def __iter__(self) -> Iterator[tuple[Size, Any]]:
        return iter(zip(self.sizes, self.examples, strict=True))

    def __len__(self) -> int:
        return len(self.sizes)

    def each(self, change: Callable[[Any], Any]) -> Workload:
        """Return the workload with `change` applied to each example."""
        weights = [size.weight for size in self.sizes]
        return Workload(map(change, self.examples), weights=weights)

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of the example with the most weight."""
        return _call(head_of(self)).args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The named arguments of the example with the most weight."""
        return _call(head_of(self)).kwargs


def head_of(batch: Any) -> Any:
    """Return the example itself, or that of a workload with the most weight, the first of several."""
    return max(sizes_of(batch), key=lambda each: each[0].weight)[1]


def sizes_of(batch: Any) -> list[tuple[Size, Any]]:
    """Return each size of a workload with its example; of one example, that as the only size."""
    return list(batch) if isinstance(batch, Workload) else [(Size("", 1.0, 0), batch)]


def each_of(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the example with `change` applied to it, or the workload with it applied to each."""
    return batch.each(change) if isinstance(batch, Workload) else change(batch)


def least_batch(batch: Any) -> int | None:
    """Return the smallest batch of all sizes; None if no tensor has one."""
    batches = [_call(example).batch for _, example in sizes_of(batch)]
    return min((count for count in batches if count is not None), default=None)


def for_each_size(name: str, *others: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function whose argument `name` is an example take a Workload: it is called for each size.

    The arguments `others` hold a value for each size, if they are sequences. The class of its results has a
    classmethod `merged`, which makes one of (size, result) for each; that of one size is the result.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            bound = signature.bind(*args, **kwargs)
            several = {k: v for k in others if isinstance(v := bound.arguments.get(k), Sequence)}
            results = []
            for index, (size, example) in enumerate(sizes_of(bound.arguments[name])):
                own = {key: values[index] for key, values in several.items()}
                bound.arguments |= {name: example, **own}
                with naming(size):
                    results.append((size, function(*bound.args, **bound.kwargs)))
            first: Any = results[0][1]
            return first if len(results) == 1 else type(first).merged(results)

        return called

    return decorate


@contextmanager
def naming(size: Size) -> Iterator[None]:
    """Name the size, if it has a name, in an error of the model's own code in the block."""
    try:
        yield
    except ModelError as error:
        if not size.name:
            raise
        problems = (replace(p, wrong=f"at {size.name}: {p.wrong}") for p in error.problems)
        raise ModelError.of(problems) from error


def _call(example: Any) -> Call:
    from prepare.core.forward.call import call_of

    return call_of(example)


def _problems(count: int, weights: Sequence[float]) -> Iterator[Problem]:
    if not count:
        yield Problem("input.workload", "holds no example", "give one for each size")
    elif len(weights) != count:
        wrong = f"{len(weights)} weights are given for {count} examples"
        yield Problem("input.workload", wrong, "give one for each")
    for index, weight in enumerate(weights):
        try:
            check_weight(weight)
        except ValueError as error:
            yield Problem(f"input.workload[{index}].weight", *error.args)
    if count and weights and not any(weights):
        yield Problem("input.workload", "every weight is 0", "give one above 0")


def _names(examples: Sequence[Sequence[torch.Tensor]]) -> list[str]:
    """Return the shortest names that tell the sizes apart."""
    shapes = [tuple(each[0].shape) if each else () for each in examples]
    whole = [", ".join(_shape(tensor.shape) for tensor in each) for each in examples]
    dtypes = [", ".join(str(tensor.dtype)[6:] for tensor in each) for each in examples]
    choices = [whole, [f"{a} {b}" for a, b in zip(whole, dtypes, strict=True)]]
    if all(shapes):
        choices.insert(0, list(map(_shape, shapes)))
        if len({shape[1:] for shape in shapes}) == 1:
            choices.insert(0, [f"batch {shape[0]}" for shape in shapes])
        elif len({shape[:2] for shape in shapes}) == 1:
            choices.insert(0, [_shape(shape[2:]) for shape in shapes])
    return next((each for each in choices if len({*each}) == len(each)), choices[-1])


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def verdicts_text(verdicts: Mapping[Size, Any]) -> str:
    """Return the verdicts of sizes by what they say; each has a `verdict`, a `ratio` and a `ratio_interval`.

    >>> from types import SimpleNamespace as Row
    >>> sizes = [Size(f"batch {count}", 1.0, count) for count in (1, 4, 8)]
    >>> found = [("slower", 1.08), ("faster", 0.8), ("faster", 0.5)]
    >>> rows = [Row(verdict=word, ratio=ratio, ratio_interval=None) for word, ratio in found]
    >>> verdicts_text(dict(zip(sizes, rows)))
    'up to 2.0x faster from batch 4 on; 1.08x slower at batch 1'
    """
    every = sorted(verdicts, key=lambda size: size.elements)
    ordered = sorted(every, key=lambda size: _ORDER.index(verdicts[size].verdict))
    parts = []
    for verdict, group in groupby(ordered, key=lambda size: verdicts[size].verdict):
        sizes = list(group)
        rows, text = [verdicts[size] for size in sizes], verdict
        if verdict in ("faster", "slower"):
            row = rows[0]
            one = verdict_text(verdict, row.ratio, row.ratio_interval)
            text = _largest(verdict, rows) if rows[1:] else one
        parts.append(f"{text} {place(sizes, every)}")
    return "; ".join(parts)


def place(sizes: Sequence[Size], every: Sequence[Size]) -> str:
    """Return where these of all sizes are, both from the smallest on: `from batch 4 on`, `at batch 1`."""
    names, count = [size.name for size in sizes], len(sizes)
    lengths = [list(map(int, re.findall(r"\d{1,18}", size.name))) for size in every]
    grows = all(all(map(le, a, b)) for a, b in pairwise(lengths))
    if grows and 1 < count < len(every):
        if list(sizes) == list(every[-count:]):
            return f"from {names[0]} on"
        if list(sizes) == list(every[:count]):
            return f"at {names[-1]} and below"
    return f"at {', '.join(names)}"


def _largest(verdict: str, rows: Sequence[Any]) -> str:
    """Return `up to 2.0x faster`; a wide interval counts with its end nearer to 1."""
    faster = verdict == "faster"
    ratios = [
        row.ratio_interval[faster]
        if row.ratio_interval and is_wide(row.ratio_interval)
        else row.ratio
        for row in rows
        if row.ratio is not None
    ]
    largest = (min if faster else max)(ratios, default=None)
    return f"up to {verdict_text(verdict, largest)}" if largest else verdict
