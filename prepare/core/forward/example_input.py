"""Build the example input of a model from plain configuration: random tensors and plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from prepare.core.utils.options import read_options
from prepare.errors import ConfigError, Problem, raise_problems

if TYPE_CHECKING:
    import torch

Float = Literal["float16", "bfloat16", "float32", "float64"]
Integer = Literal["int64", "int32", "int16", "int8", "uint8"]
Dtype = Literal[Float, Integer, "bool", "complex64", "complex128"]
INTEGERS = get_args(Integer)
_TENSOR_KEYS = ("shape", "dtype", "low", "high")
_SIZES = "a list of sizes, as in [2,3,64,64]"


def _check_sizes(shape: tuple[int, ...]) -> None:
    if any(size < 1 for size in shape):
        raise ValueError(f"{list(shape)} holds a size below 1", f"give {_SIZES}")


_Bound = Annotated[int | float, "a number or null"] | None


@dataclass(frozen=True)
class TensorSpec:
    """One random tensor.

    Floats are standard normal, or uniform in [low, high) if `low` or `high` is set; integers are
    uniform in [low, high); booleans are uniform.
    """

    shape: Annotated[tuple[int, ...], _SIZES, _check_sizes]
    dtype: Dtype = "float32"
    low: _Bound = None
    high: _Bound = None

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Draw the tensor in float32 and round it, so that every precision has the same values."""
        import torch

        dtype = getattr(torch, self.dtype)
        low, high = (0, 2) if self.dtype == "bool" else self.bounds()
        if self.dtype in INTEGERS or self.dtype == "bool":
            return torch.randint(int(low), int(high), self.shape, generator=generator).to(dtype)
        if dtype.is_complex:
            return torch.randn(self.shape, dtype=dtype, generator=generator)
        if self.low is None and self.high is None:
            return torch.randn(self.shape, generator=generator).to(dtype)
        return (torch.rand(self.shape, generator=generator) * (high - low) + low).to(dtype)

    def bounds(self) -> tuple[float, float]:
        """Return `low` and `high`, by default 0 and 1."""
        return (0.0 if self.low is None else self.low, 1.0 if self.high is None else self.high)


@dataclass(frozen=True)
class _Declared:
    """The keys of `input`: those of its first tensor are checked with it."""

    shape: Any = None
    dtype: Any = None
    low: Any = None
    high: Any = None
    args: Annotated[list, "a list, as in [item,item]"] | None = None  # type: ignore[type-arg]  # any items
    kwargs: Annotated[dict[str, Any], "a mapping, as in {name:item}"] | None = None
    factory: Annotated[str, "a dotted name, as in my_package.batch"] | None = None


@dataclass(frozen=True)
class Example:
    """The arguments of `model(*args, **kwargs)`; empty if no example was declared.

    `factory` is the dotted name of the function that returns them, as long as it is not called.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    factory: str | None = None

    def __bool__(self) -> bool:
        return bool(self.args or self.kwargs or self.factory)


def read_example(config: Mapping[str, Any] | None) -> Example:
    """Return the example with a TensorSpec for every tensor, without torch.

    Raises:
        ConfigError: with one problem for every mistake in `config`.
    """
    problems: list[Problem] = []
    example = _read(config or {}, problems)
    raise_problems(ConfigError, problems)
    return example


def build_example(config: Mapping[str, Any] | None, seed: int = 0) -> Example:
    """Return the example input that `config` declares, on the CPU; the seed determines the values.

    `shape`, `dtype`, `low` and `high` declare one tensor, the first positional argument. `args` is a
    list and `kwargs` a mapping; their items are mappings with the same four keys, plain values, or mappings
    and lists of such items. What `factory` names is not called.

    Raises:
        ConfigError: with one problem for every mistake in `config`.
    """
    import torch

    example = read_example(config)
    generator = torch.Generator().manual_seed(seed)

    def draw(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: draw(item) for key, item in value.items()}
        if isinstance(value, list):
            return [draw(item) for item in value]
        return value.draw(generator) if isinstance(value, TensorSpec) else value

    return Example(tuple(map(draw, example.args)), draw(example.kwargs), example.factory)


def _read(config: Mapping[str, Any], problems: list[Problem]) -> Example:
    """Return the example of these keys; add to `problems`."""
    try:
        given = _Declared(**read_options(_Declared, config, where="input", noun="key"))
    except ConfigError as error:
        problems += error.problems
        return Example()
    factory = [(key, "factory") for key in ("shape", "args", "kwargs")]
    for key, other in (*factory, ("shape", "args")):
        if getattr(given, key) and getattr(given, other):
            remedy = f"drop one of them, with input.{key}=null or input.{other}=null"
            problems.append(Problem(f"input.{key}", f"is set together with input.{other}", remedy))
    if given.factory is not None:
        return Example(factory=given.factory)
    items = {f"input.args[{index}]": item for index, item in enumerate(given.args or [])}
    if given.shape is not None:
        items = {"input": {key: config[key] for key in _TENSOR_KEYS if key in config}} | items
    named = {str(key): item for key, item in (given.kwargs or {}).items()}
    return Example(
        tuple(_item(item, place, problems) for place, item in items.items()),
        {key: _item(item, f"input.kwargs.{key}", problems) for key, item in named.items()},
    )


def _item(item: Any, where: str, problems: list[Problem]) -> Any:
    """Return the TensorSpec of a mapping, or a plain value unchanged; add to `problems`.

    A mapping or a list that holds mappings is an argument of its own, with an item in each place.
    """
    if isinstance(item, list):
        places = ((f"{where}[{index}]", each) for index, each in enumerate(item))
        return [_item(each, place, problems) for place, each in places]
    if not isinstance(item, Mapping):
        return item
    if any(map(_holds_mappings, item.values())):
        return {key: _item(each, f"{where}.{key}", problems) for key, each in item.items()}
    # A key that is null has its default.
    options = {k: v for k, v in item.items() if v is not None or k not in _TENSOR_KEYS}
    try:
        spec = TensorSpec(**read_options(TensorSpec, options, where=where, noun="key"))
    except ConfigError as error:
        problems += error.problems
        return None
    problems += (Problem(f"{where}.{key}", *text) for key, *text in _bound_problems(spec))
    return spec


def _holds_mappings(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_holds_mappings, value))
    return isinstance(value, Mapping)


def _bound_problems(spec: TensorSpec) -> Iterator[tuple[str, str, str]]:
    low, high = spec.bounds()
    if spec.dtype in INTEGERS and spec.high is None:
        remedy = "give the first number that is too high, as in input.high=1000 for 0 to 999"
        yield "high", f"is missing for {spec.dtype}", remedy
    elif not low < high:
        remedy = "values are in [low, high), by default in [0, 1)"
        yield "high", f"[{low}, {high}) holds no number", remedy
    elif spec.dtype in INTEGERS and (low % 1 or high % 1):
        yield "high", f"[{low}, {high}) has no whole bounds", f"the dtype is {spec.dtype}"
