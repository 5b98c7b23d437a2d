"""Weights in 8 bits: choose them, say of every other one why it is not, and quantize them with torchao."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from prepare.core.model.quantized import (
    dtype_text,
    is_quantized,
    quantized_weight,
    scale_text,
    stored_bytes,
)
from prepare.core.model.tensors import NamedTensor, identity, is_lazy, named_tensors
from prepare.core.utils.process_state import ignored_warnings
from prepare.core.utils.text import first_line
from prepare.core.utils.wording import option
from prepare.errors import PatternError, RefusedError
from prepare.patterns import matches, near_misses
from prepare.step import Storage

# torchao computes the scales of these.
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# cuBLAS multiplies int8 matrices whose sizes are multiples of this; torchao computes others on the CPU.
_CUBLAS = 8
_SCALE_BYTES, _ZERO_POINT_BYTES = 4, 1


class Grid(NamedTuple):
    """The rounding of weights: values that share a scale (None for a row), and whether inputs are rounded."""

    group_size: int | None
    inputs: bool

    def block(self, weight: Tensor) -> tuple[int, int]:
        """Return the shape of the values that share a scale."""
        return 1, self.group_size or weight.shape[1]

    def storage(self, weight: Tensor) -> Storage:
        """Return how this weight is stored."""
        block = self.block(weight)
        text = scale_text("int8", tuple(weight.shape), block, inputs=self.inputs)
        scales = weight.shape[0] * (weight.shape[1] // block[1])
        return Storage(text, weight.numel() + scales * (_SCALE_BYTES + _ZERO_POINT_BYTES))


@dataclass(frozen=True)
class WeightChoice:
    """The patterns and the rounding of a step, and the device on which the model will run."""

    step: str
    grid: Grid
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    device: str | None

    def storages(self, model: nn.Module) -> dict[str, Storage]:
        """Return, for every tensor of weights by its path, how it is stored or why it stays as it is.

        Raises:
            PatternError: a pattern matches no Linear.
        """
        places = [place for place in named_tensors(model) if _holds_weights(place)]
        self._check_patterns(places)
        tied: dict[object, list[NamedTensor]] = {}
        for place in places:
            tied.setdefault(identity(place.tensor), []).append(place)
        found: dict[str, Storage] = {}
        for group in tied.values():
            found |= self._stored(group)
        return found

    def pending(self, model: nn.Module) -> list[NamedTensor]:
        """Return every place of every weight that is still to be quantized."""
        storages = self.storages(model)
        return [
            place
            for place in named_tensors(model)
            if place.path in storages
            and storages[place.path].dtype
            and not is_quantized(place.tensor)
        ]

    def _stored(self, group: list[NamedTensor]) -> Mapping[str, Storage]:
        """Return the storage of all places of one tensor: it is quantized in all, or in none."""
        left = [(place, answer) for place in group if (answer := self._left(place))]
        if not left:
            weight = group[0].tensor
            stored = (
                Storage(dtype_text(weight), stored_bytes(weight)) if is_quantized(weight) else None
            )
            return dict.fromkeys(
                (place.path for place in group), stored or self.grid.storage(weight)
            )
        return {place.path: _left_with(place, left) for place in group}

    def _left(self, place: NamedTensor) -> Storage | None:
        """Return why the tensor is not quantized because of this place, or None."""
        if reason := self._reason(place):
            return Storage(reason=reason)
        pattern = next((p for p in self.exclude if _matches(p, place)), None)
        if pattern is not None:
            return Storage(reason=f"exclude: {pattern}", is_excluded=True)
        if self.include and not any(_matches(p, place) for p in self.include):
            return Storage(reason="include: no pattern matches", is_excluded=True)
        return None

    def _reason(self, place: NamedTensor) -> str:
        """Return what in the module or its tensor is in the way; empty for nothing."""
        module, weight, kind = place.module, place.tensor, type(place.module).__name__
        if place.computes:
            return f"{kind} computes its {place.computes} from it"
        if not _is_linear(place):
            return "torchao quantizes weights of Linear only"
        if isinstance(module, NonDynamicallyQuantizableLinear):
            return "MultiheadAttention reads it itself"
        if type(module).forward is not nn.Linear.forward:
            return f"{kind} has a forward of its own"
        if is_quantized(weight):
            wanted, current = self.grid.storage(weight).dtype, dtype_text(weight)
            return "" if current == wanted else f"is {current} already, and not {wanted}"
        if weight.dtype not in _FLOATS:
            return f"torchao quantizes no {str(weight.dtype).removeprefix('torch.')}"
        if not weight.numel():
            return "holds no values"
        size = self.grid.group_size
        if size and weight.shape[1] % size:
            return f"group_size {size} does not divide its {weight.shape[1]} columns"
        device = self.device or weight.device.type
        if (
            self.grid.inputs
            and device.partition(":")[0] == "cuda"
            and any(length % _CUBLAS for length in weight.shape)
        ):
            return f"cuBLAS needs multiples of {_CUBLAS} as sizes, and torchao would use the CPU"
        return ""

    def _check_patterns(self, places: list[NamedTensor]) -> None:
        linear = {place.module_name: place.module for place in places if _is_linear(place)}
        for key in ("include", "exclude"):
            for pattern in getattr(self, key):
                if not any(matches(pattern, name, module) for name, module in linear.items()):
                    wrong = f"{pattern!r} matches no Linear"
                    where = f"steps.{self.step}.{key}"
                    raise PatternError(where, wrong, near_misses(pattern, linear))


def quantized_places(model: nn.Module) -> Iterator[NamedTensor]:
    """Yield every place of every quantized weight of a Linear."""
    return (p for p in named_tensors(model) if _is_linear(p) and is_quantized(p.tensor))


def quantized(weight: Tensor, grid: Grid, path: str) -> nn.Parameter:
    """Return a new weight of a Linear, in 8 bits; `weight` itself is not changed. `path` is its name.

    torchao quantizes it in a Linear of its own: in the model it would also replace `extra_repr` of the
    module by a function that cannot be pickled.

    Raises:
        RefusedError: a value is not finite, which would make NaN of its row; torchao cannot be imported.
    """
    with _quiet():
        try:
            from torchao.quantization import quantize_
        except Exception as error:  # a torchao made for another torch
            wrong = (
                f"torchao cannot be imported with torch {torch.__version__}: {first_line(error)}"
            )
            remedy = "install a torchao for this torch"
            raise RefusedError("steps.quantize", wrong, remedy) from error

        carrier = nn.Linear(1, 1, bias=False, device="meta")
        carrier.weight = cast("nn.Parameter", weight)
        with torch.no_grad():
            quantize_(carrier, _config(weight, grid))
    if not cast("Any", carrier.weight).scale.isfinite().all():
        wrong = "holds NaN or infinity, which would make NaN of all values with the same scale"
        raise RefusedError(path, wrong, option("quantize", "exclude", [path.rpartition(".")[0]]))
    return carrier.weight


def refuse_floats(module: nn.Module) -> None:
    """Let `module.load_state_dict` refuse a float weight: torch's own message names no cause."""
    module.register_load_state_dict_pre_hook(_refuse)


def release(module: nn.Module) -> None:
    """Remove the hook."""
    hooks = module._load_state_dict_pre_hooks
    for key, hook in list(hooks.items()):
        if getattr(hook, "hook", hook) is _refuse:
            del hooks[key]


def _holds_weights(place: NamedTensor) -> bool:
    """Return whether the tensor may be a weight: a parameter of at least two dimensions."""
    tensor = place.tensor
    if place.kind != "parameter" or is_lazy(tensor) or tensor.dim() < 2:
        return False
    return tensor.is_floating_point() or is_quantized(tensor)


def _is_linear(place: NamedTensor) -> bool:
    return isinstance(place.module, nn.Linear) and place.name == "weight"


def _matches(pattern: str, place: NamedTensor) -> bool:
    return matches(pattern, place.module_name, place.module)


def _left_with(place: NamedTensor, left: list[tuple[NamedTensor, Storage]]) -> Storage:
    """Return why a tensor stays in this place, which may be because of another one."""
    other, answer = next((each for each in left if each[0] is place), left[0])
    return (
        answer if other is place else answer._replace(reason=f"{answer.reason} (as {other.path})")
    )


def _refuse(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    value = state.get(f"{prefix}weight")
    # With assign=True the file's tensor replaces the weight, whatever it is.
    if value is None or metadata.get("assign_to_params_buffers") or is_quantized(value):
        return
    if quantized_weight(module) is not None:
        wrong = "is in 8 bits, and the file holds float values"
        remedy = "load first, then quantize; or prepare.steps.quantize.undo(model, weights) first"
        raise RefusedError(f"{prefix}weight", wrong, remedy)


def _config(weight: Tensor, grid: Grid) -> Any:
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        PerGroup,
        PerRow,
    )
    from torchao.utils import should_reduce_range

    # Without set_inductor_config: it changes inductor's settings for all models of the process.
    if grid.inputs:
        # Without VNNI the kernel of a CPU adds products up in 16 bits, which overflow for 8-bit factors.
        return Int8DynamicActivationInt8WeightConfig(
            granularity=PerRow(),
            set_inductor_config=False,
            reduce_range=should_reduce_range(weight.device),
        )
    scales = PerGroup(grid.group_size) if grid.group_size else PerRow()
    return Int8WeightOnlyConfig(granularity=scales, set_inductor_config=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what torchao logs at its import: kernels for other devices, and a deprecation in torch."""
    with ignored_warnings():
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
