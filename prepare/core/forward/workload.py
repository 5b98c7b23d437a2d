"""A workload: example inputs of several sizes, each with the number of its calls as a weight."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from prepare.core.forward.example_input import check_weight
from prepare.core.utils.sizes import Size
from prepare.errors import ConfigError, ModelError, Problem

if TYPE_CHECKING:
    import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Workload:
    """Example inputs of several sizes: given in place of one, every size is verified and timed.

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
        tensors = [_tensors(example) for example in self.examples]
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
    def head(self) -> Any:
        """The example with the most weight, the first of several: for what takes one size."""
        return max(self, key=lambda each: each[0].weight)[1]


def head_of(batch: Any) -> Any:
    """Return the example itself, or that of a workload with the most weight."""
    return batch.head if isinstance(batch, Workload) else batch


def sizes_of(batch: Any) -> list[tuple[Size, Any]]:
    """Return each size of a workload with its example; of one example, that as the only size."""
    return list(batch) if isinstance(batch, Workload) else [(Size("", 1.0, 0), batch)]


def for_each_size(name: str, *others: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function whose argument `name` is an example take a Workload: it is called for each size.

    With a Workload the arguments `others` hold a value for each size, if they are sequences. The class of
    its results has a classmethod `merged`, which makes one of (size, result) for each.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            bound = signature.bind(*args, **kwargs)
            workload = bound.arguments.get(name)
            if not isinstance(workload, Workload):
                return function(*args, **kwargs)
            several = {key: bound.arguments.get(key) for key in others}
            results = []
            for index, (size, example) in enumerate(workload):
                own = {key: v[index] for key, v in several.items() if isinstance(v, Sequence)}
                bound.arguments |= {name: example, **own}
                with naming(size):
                    results.append((size, function(*bound.args, **bound.kwargs)))
            return merged(results)

        return called

    return decorate


@contextmanager
def naming(size: Size) -> Iterator[None]:
    """Name the size in an error of the model's own code in the block."""
    try:
        yield
    except ModelError as error:
        problems = (replace(p, wrong=f"at {size.name}: {p.wrong}") for p in error.problems)
        raise ModelError.of(problems) from error


def merged(results: Sequence[tuple[Size, _R]]) -> _R:
    """Return one result for those of all sizes; of one size its own."""
    if len(results) == 1:
        return results[0][1]
    return cast("_R", cast("Any", type(results[0][1])).merged(results))


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


def _tensors(example: Any) -> list[torch.Tensor]:
    from prepare.core.forward.nested import arguments, tensors_in

    args, kwargs = arguments(example)
    return list(tensors_in([*args, *kwargs.values()]))


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
