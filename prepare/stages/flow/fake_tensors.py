"""Correct the strides of torch's fake tensors, and say why a forward cannot run on them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from prepare.core.forward.run_example import explained
from prepare.core.model.tensors import is_plain
from prepare.core.utils.suggest import ALIASES
from prepare.errors import ConfigError, RefusedError
from prepare.stages.flow.torch_operators import cudnn_format, is_convolution

_VIEWS = ("aten::view", "aten::_unsafe_view")
# On a CPU the first output of these operators has the format of the input.
_IN_FORMAT_OF_INPUT = (
    "aten::native_group_norm",
    "aten::replication_pad2d",  # in torch 2.5
    "aten::reflection_pad2d",
    "aten::replication_pad3d",
    "aten::reflection_pad3d",
)
# On CUDA the outputs of these operators are contiguous for any input, by torch's shape functions.
_CONTIGUOUS_ON_CUDA = (
    "aten::native_group_norm",
    "aten::reflection_pad2d",
    "aten::reflection_pad3d",
    "aten::replication_pad2d",
    "aten::replication_pad3d",
    "aten::pixel_shuffle",
)

_CPU = torch.device("cpu")
_ELSEWHERE = (
    "predicted for a CUDA that is not here: convolutions return what cuDNN's rule says, copies inside "
    "kernels and the outputs of interpolate are those of a CPU, and code that asks a tensor for its device "
    "finds a CPU"
)

_NEEDS_VALUE = "needs the value of a tensor, as an if, a loop or .item() over data does"
_NO_KERNEL = "cannot run without data"
# Keyed by the name of the class, since torch has moved these classes between modules.
_REASONS = {
    "DataDependentOutputException": _NEEDS_VALUE,
    "GuardOnDataDependentSymNode": _NEEDS_VALUE,
    "DynamicOutputShapeException": "gives a tensor whose shape depends on the data",
    "UnsupportedOperatorException": _NO_KERNEL,
    "UnsupportedFakeTensorException": _NO_KERNEL,
}


class Target(NamedTuple):
    """The device that a flow is for, and that of the tensors to run: CUDA that is not here runs on the CPU.

    `note` says what is not known of the device; it may be empty.
    """

    device: torch.device
    runs_on: torch.device
    note: str = ""

    @classmethod
    def of(cls, present: torch.device, asked: torch.device | str | None) -> Target:
        """Return the target for a model on the device `present`.

        Raises:
            ConfigError: `asked` is not the name of a device.
            RefusedError: no layout is known of a device of this type that is not here.
        """
        try:
            named = ALIASES.get(asked, asked) if isinstance(asked, str) else asked
            device = present if named is None else torch.device(named)
        except RuntimeError as error:
            wrong = f"{asked!r} is not a device"
            raise ConfigError("device", wrong, "write cpu or cuda") from error
        if device.type == "meta":
            note = "predicted for the CPU: the model is on the meta device" if asked is None else ""
            return cls(_CPU, _CPU, note)
        if device.type == "cpu" or torch.get_device_module(device.type).is_available():
            return cls(device, device)
        if device.type != "cuda":
            wrong = f"there is no {device} here, and its layouts are not known"
            raise RefusedError("device", wrong, "predict or observe where it is")
        return cls(device, _CPU, _ELSEWHERE)

    def stand_in(self, fake: FakeTensorMode, tensor: Tensor) -> Tensor:
        """Return a fake tensor for `tensor`, on the device to run on if it is a plain tensor."""
        if tensor.device == self.runs_on or not is_plain(tensor):
            return fake.from_tensor(tensor, static_shapes=True)
        shape, stride = tuple(tensor.shape), tensor.stride()
        with fake:
            moved = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=self.runs_on)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(moved, tensor.requires_grad)
        return moved.requires_grad_(tensor.requires_grad)


def correct_strides(operator_name: str, args: tuple, output: Any, *, as_cuda: bool = False) -> Any:
    """Return the output of an operator with the strides that it has for real tensors.

    Viewing a tensor in its own shape gives dimensions of size 1 new strides, but a fake tensor keeps
    the old ones. These strides decide how torch's kernels read one sample (see `has_odd_strides`).
    On a CPU, padding by replication or reflection keeps channels-last, and group norm gives one sample the
    strides of the format. With `as_cuda` they give contiguous tensors, and convolutions the format of cuDNN.
    """
    if as_cuda and is_convolution(operator_name.removeprefix("aten::")):
        return output.contiguous(memory_format=cudnn_format(*args[:2]))
    if isinstance(output, tuple):  # of a norm, whose first output is the activation
        first = correct_strides(operator_name, args, output[0], as_cuda=as_cuda)
        return output if first is output[0] else (first, *output[1:])
    if as_cuda and operator_name in _CONTIGUOUS_ON_CUDA:
        return output.contiguous()
    if not as_cuda and operator_name in _IN_FORMAT_OF_INPUT:
        return _in_format_of(args[0], output)
    if operator_name not in _VIEWS or not isinstance(output, FakeTensor) or 1 not in output.shape:
        return output
    real_stride = _view_stride(args[0], output.shape)
    if real_stride == output.stride():
        return output
    return output.as_strided(output.shape, real_stride, output.storage_offset())


def _in_format_of(source: Tensor, output: Any) -> Any:
    """Return a fake output on a CPU with exactly the strides of the format of `source`."""
    if not isinstance(output, FakeTensor) or output.device.type != "cpu":
        return output
    memory_format = suggest_memory_format(source)
    with _disable_current_modes():
        shape = tuple(output.shape)
        stride = torch.empty(shape, memory_format=memory_format, device="meta").stride()
    dense = output.contiguous(memory_format=memory_format)
    return dense if dense.stride() == stride else dense.as_strided(shape, stride, 0)


def explain_failure(model: nn.Module, error: Exception) -> str:
    """Explain in one sentence which module cannot be predicted, what it needs, and what to do."""
    problem = explained(model, error).problems[0]
    need = _REASONS.get(type(error).__name__)
    if need is None:
        # An example that is wrong here is wrong for a real forward too.
        return f"{problem.where}: {problem.wrong}; {problem.remedy or 'observe a real forward instead'}"
    operation = getattr(error, "func", None) or error
    return f"{problem.where}: {operation} {need}; observe a real forward instead"


def _view_stride(tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    with _disable_current_modes():
        real = torch.empty_strided(tuple(tensor.shape), tensor.stride(), device="meta")
        return real.view(tuple(shape)).stride()
