"""Build the example input of a model from plain configuration: random tensors and plain values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prepare.core.utils.options import ALIASES, as_written
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool", "complex64", "complex128")
KEYS = ("shape", "dtype", "low", "high", "args", "kwargs")
_TENSOR_KEYS = KEYS[:4]


@dataclass(frozen=True)
class TensorSpec:
    """One random tensor.

    Floats are standard normal, or uniform in [low, high) if `low` or `high` is set; integers are
    uniform in [low, high); booleans are uniform.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float | None = None
    high: float | None = None

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Draw the tensor in float32 and round it, so that every precision has the same values."""
        import torch

        dtype = getattr(torch, self.dtype)
        if self.dtype in INTEGERS or self.dtype == "bool":
            first, end = (
                (0, 2) if self.dtype == "bool" else (int(self.low or 0), int(self.high or 0))
            )
            return torch.randint(first, end, self.shape, generator=generator).to(dtype)
        if dtype.is_complex:
            return torch.randn(self.shape, dtype=dtype, generator=generator)
        if self.low is None and self.high is None:
            return torch.randn(self.shape, generator=generator).to(dtype)
        low, high = self.bounds()
        return (torch.rand(self.shape, generator=generator) * (high - low) + low).to(dtype)

    def bounds(self) -> tuple[float, float]:
        """Return `low` and `high`, by default 0 and 1."""
        return (0.0 if self.low is None else self.low, 1.0 if self.high is None else self.high)


@dataclass(frozen=True)
class Example:
    """The arguments of `model(*args, **kwargs)`; empty if no example was declared."""

    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.args or self.kwargs)


def read_example(config: Mapping[str, Any] | None) -> Example:
    """Return the example with a TensorSpec for every tensor, without torch.

    Raises:
        ConfigError: with one problem for every mistake in `config`.
    """
    problems: list[Problem] = []
    example = _read(config or {}, problems)
    if problems:
        raise ConfigError.of(problems)
    return example


def build_example(config: Mapping[str, Any] | None, seed: int = 0) -> Example:
    """Return the example input that `config` declares, on the CPU; the seed determines the values.

    `shape`, `dtype`, `low` and `high` declare one tensor, the first positional argument. `args` is a
    list and `kwargs` a mapping; their items are mappings with the same four keys, or plain values.

    Raises:
        ConfigError: with one problem for every mistake in `config`.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    example = read_example(config)

    def draw(value: Any) -> Any:
        return value.draw(generator) if isinstance(value, TensorSpec) else value

    return Example(
        tuple(map(draw, example.args)), {key: draw(value) for key, value in example.kwargs.items()}
    )


def _read(config: Mapping[str, Any], problems: list[Problem]) -> Example:
    problems += _unknown(config, "input", KEYS)
    args, kwargs = config.get("args"), config.get("kwargs")
    if args is not None and not isinstance(args, list):
        problems.append(
            Problem("input.args", f"{as_written(args)} is not a list", "give [item,item]")
        )
        args = None
    if kwargs is not None and not isinstance(kwargs, Mapping):
        problems.append(
            Problem("input.kwargs", f"{as_written(kwargs)} is not a mapping", "give {name:item}")
        )
        kwargs = None
    single = config.get("shape") is not None
    if single and args:
        remedy = "drop one of them, with input.shape=null or input.args=null"
        problems.append(Problem("input.shape", "is set together with input.args", remedy))
    items = [_tensor(config, "input", _TENSOR_KEYS, problems)] if single else []
    items += [_item(item, f"input.args[{i}]", problems) for i, item in enumerate(args or [])]
    named = {
        str(key): _item(item, f"input.kwargs.{key}", problems)
        for key, item in (kwargs or {}).items()
    }
    return Example(tuple(items), named)


def _unknown(config: Mapping[str, Any], where: str, keys: tuple[str, ...]) -> Iterator[Problem]:
    for key in config:
        if key not in keys:
            yield Problem(f"{where}.{key}", "no such key", choose(str(key), keys, noun="keys"))


def _item(item: Any, where: str, problems: list[Problem]) -> Any:
    """Return a TensorSpec if the item is a mapping, else the plain value itself."""
    if not isinstance(item, Mapping):
        return item
    problems += _unknown(item, where, _TENSOR_KEYS)
    return _tensor(item, where, tuple(item), problems)


def _tensor(
    item: Mapping[str, Any], where: str, keys: tuple[str, ...], problems: list[Problem]
) -> TensorSpec:
    before = len(problems)
    values: dict[str, Any] = dict.fromkeys(_TENSOR_KEYS)
    values |= {key: item.get(key) for key in keys if key in values}
    for key, check in _CHECKS.items():
        problems += (Problem(f"{where}.{key}", *mistake) for mistake in check(values[key]))
    dtype = _dtype(values["dtype"])
    if len(problems) == before:
        problems += (
            Problem(f"{where}.{key}", *mistake)
            for key, *mistake in _range(dtype, values["low"], values["high"])
        )
    if len(problems) > before:
        return TensorSpec(())
    return TensorSpec(tuple(values["shape"]), dtype, values["low"], values["high"])


def _dtype(value: Any) -> Any:
    word = ("float32" if value is None else str(value)).removeprefix("torch.")
    return word if word in DTYPES else ALIASES.get(word.lower(), word)


def _check_shape(value: Any) -> Iterator[tuple[str, str]]:
    remedy = "give a list of sizes, as in [2,3,64,64]"
    if value is None:
        yield "is missing", remedy
    elif not isinstance(value, list) or any(type(size) is not int for size in value):
        yield f"{as_written(value)} is not a list of whole numbers", remedy
    elif any(size < 1 for size in value):
        yield f"{value!r} holds a size below 1", remedy


def _check_dtype(value: Any) -> Iterator[tuple[str, str]]:
    if _dtype(value) not in DTYPES:
        yield f"{as_written(value)} is not a dtype", choose(str(value), DTYPES)


def _check_bound(value: Any) -> Iterator[tuple[str, str]]:
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        yield f"{as_written(value)} is not a finite number", "give a number or null"


def _range(dtype: str, low: Any, high: Any) -> Iterator[tuple[str, str, str]]:
    whole = dtype in INTEGERS
    if whole and high is None:
        remedy = "give the first number that is too high, as in high=1000 for 0 to 999"
        yield "high", f"is missing for {dtype}", remedy
    mistakes = list(_unfit(dtype, low, high)) if whole else []
    yield from mistakes
    if mistakes or (high is None and (low is None or whole)) or dtype not in (*FLOATS, *INTEGERS):
        return
    first, last = TensorSpec((), dtype, low, high).bounds()
    if first >= last and high is None:
        yield (
            "high",
            "is missing",
            f"give one above low, which is {low}; without it values end at 1",
        )
    elif first >= last and low is None:
        yield (
            "low",
            "is missing",
            f"give one below high, which is {high}; without it values start at 0",
        )
    elif first >= last:
        yield "high", f"{high} is not above low, which is {low}", "values are in [low, high)"


def _unfit(dtype: str, low: Any, high: Any) -> Iterator[tuple[str, str, str]]:
    signed = not dtype.startswith("u")
    bits = int(dtype.removeprefix("u").removeprefix("int")) - signed
    # `high` itself is not drawn; torch does not accept 2**63.
    for key, bound, last in (("low", low, 2**bits - 1), ("high", high, min(2**bits, 2**63 - 1))):
        if isinstance(bound, float) and not bound.is_integer():
            yield key, f"{bound!r} is not a whole number", f"give one, as the dtype is {dtype}"
        elif bound is not None and not -(2**bits) * signed <= bound <= last:
            yield key, f"{bound} is out of range for {dtype}", "choose another input.dtype"


_CHECKS: dict[str, Callable[[Any], Iterator[tuple[str, str]]]] = {
    "shape": _check_shape,
    "dtype": _check_dtype,
    "low": _check_bound,
    "high": _check_bound,
}
