"""Convolutions that run with what follows them in one call of oneDNN, on weights in oneDNN's own format.

A fused convolution whose batch norm, addition or activation follows returns a `Promise`: a tensor that has
not been computed. Those operations add themselves to it, and the last one runs the call. Whatever else
reads a promise computes it first, as torch would have: so no order of calls gives a wrong result.
"""

import operator
import threading
from contextlib import suppress
from functools import lru_cache
from math import isfinite
from typing import Any, ClassVar, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules import module as torchs_module
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils._pytree import tree_leaves, tree_map_only

from prepare.core.model.memory_format import CHANNELS_LAST, canonical_stride
from prepare.core.model.module_kinds import NotScriptable, is_rewritten
from prepare.steps.repairs.base import FORMATS, SwapClass, with_exact_strides
from prepare.steps.repairs.rewrites import Rewrite, Rewritten, fault_in_2d, sizes_of

STEP = "fuse_inference"
# So many numbers of a tensor show whether it was changed through `.data`.
_HEAD = 256
# Numbers in the weight of a linear layer, from which a packed one was faster.
_WIDE = 2**16
_CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.bfloat16)
# The activations, and their arguments besides `inplace`, in the order of torch.
_SIMPLE: dict[str, Any] = {key: {} for key in ("relu", "relu6", "sigmoid", "silu", "hardswish")}
ACTIVATIONS = _SIMPLE | {"gelu": {"approximate": "none"}, "leaky_relu": {"negative_slope": 0.01}}
# What oneDNN calls otherwise, with its numbers.
_AS_ONEDNN: dict[str, Any] = {"silu": ("swish", []), "relu6": ("hardtanh", [0, 6])}
# These of oneDNN return a number for NaN.
_HIDE_NAN: dict[str, Any] = {"relu": F.relu, "hardtanh": F.hardtanh}
_NO_ACTIVATION: tuple[Any, ...] = ("none", [], "")
_OF_NORM = ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
# The functions that a promise knows; those that end with `_` work in place.
KINDS = {
    getattr(owner, name): name.rstrip("_")
    for name in (*ACTIVATIONS, "relu_", "sigmoid_", "leaky_relu_", "add", "add_")
    for owner in (F, torch, Tensor)
    if hasattr(owner, name)
} | {F.batch_norm: "batch_norm"}
# The private operators, each with the number of its arguments when this was written.
_ARGUMENTS = {
    "_convolution_pointwise.default": 10,
    "_convolution_pointwise.binary": 13,
    "_convolution_transpose_pointwise.default": 11,
    "_reorder_convolution_weight.default": 6,
    "_reorder_convolution_transpose_weight.default": 7,
    "_linear_pointwise.default": 6,
    "_reorder_linear_weight.default": 2,
}
_OPERATORS: dict[str, Any] = {}
for _name, _count in _ARGUMENTS.items():
    with suppress(AttributeError):
        _operator = operator.attrgetter(_name)(torch.ops.mkldnn)
        _OPERATORS |= {_name: _operator} if len(_operator._schema.arguments) == _count else {}
# What the dispatcher includes in plain calls: it is more in a trace, a transform or a mode.
_PLAIN: set[int] = set()


def _included() -> int:
    return int(torch._C._dispatch_tls_local_include_set().raw_repr())


def _note_plain() -> None:
    _PLAIN.add(_included())
    with torch.inference_mode():
        _PLAIN.add(_included())


# In a thread of its own, as this file may be read inside of a mode.
_thread = threading.Thread(target=_note_plain)
_thread.start()
_thread.join()


def missing() -> str:
    """Return why nothing can be fused here; empty if it can."""
    lost = [f"mkldnn::{name}" for name in _ARGUMENTS if name not in _OPERATORS]
    lost += [] if torch.backends.mkldnn.is_available() else ["oneDNN"]
    return f"torch {torch.__version__} has no {lost[0]} as it is known here" if lost else ""


class _Weights(NamedTuple):
    """The folded and packed weights of a call, the sizes for it, and what they were made of."""

    sources: tuple[Any, ...]
    seen: list[tuple[Tensor, int, int, Tensor, Tensor]]
    weight: Tensor
    bias: Tensor | None
    geometry: tuple[Any, ...]
    finite: bool


# The weights of a convolution by the number of their sources, and the last form of an input.
_Ready = tuple[dict[int, _Weights], list[tuple[Any, Any, Any]]]
# What was made for each module, which copies and pickles of it make again, and the modules in each part.
_READY: WeakKeyDictionary[nn.Module, _Ready] = WeakKeyDictionary()
_INSIDE: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


class _Now(threading.local):
    """The convolutions that were ready when each traced part began that runs in this thread.

    With each stands what holds its weights, and which of them were made of the tensors that it has.
    """

    def __init__(self) -> None:
        self.checked: list[dict[nn.Module, tuple[_Ready, dict[int, _Weights]]]] = [{}]


_NOW = _Now()


class _Call(NamedTuple):
    """A call of a convolution, and what follows it until now.

    `version` adds up those of `x` and `other`; the sources are the tensors of a convolution, and of a norm.
    """

    conv: "Fused"
    x: Tensor
    version: int
    form: tuple[tuple[int, ...], tuple[int, ...]]
    checked: dict[int, _Weights]
    sources: tuple[Any, ...]
    other: Tensor | None = None
    activation: tuple[Any, ...] = _NO_ACTIVATION
    done: int = 0

    def run(self) -> Tensor:
        version = _version(self.x) + (0 if self.other is None else _version(self.other))
        if version != self.version:
            wrong = "its input was changed in place before its result was read"
            undo = f"from prepare.steps import {STEP}; {STEP}.undo(model)"
            raise RuntimeError(f"{type(self.conv).__name__}: {wrong}; undo the step: {undo}")
        return self.conv.computed(self)


class Promise(Tensor):
    """The result of a convolution that has not been computed, or the value that it has got since.

    After an operation in place it is the result of that one, which may be a promise too.
    """

    call: _Call
    held: Tensor | None

    @staticmethod
    def of(call: _Call) -> Tensor:
        shape, strides = call.form
        make: Any = Tensor._make_wrapper_subclass
        made: Promise = make(Promise, shape, strides, dtype=call.x.dtype, device=_CPU)
        made.call, made.held = call, None
        return made

    def dim(self) -> int:
        return len(self.call.form[0])

    def value(self) -> Tensor:
        if self.held is None:
            # As at the call, whatever is on now.
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                self.held = self.call.run()
        return self.held.value() if isinstance(self.held, Promise) else self.held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and (kind := KINDS.get(func, "")):
            in_place = func.__name__.endswith("_")
            turns = kind == "add" and not in_place and type(args[0]) is not Promise and not kwargs
            first, *others = args[::-1] if turns else args
            if type(first) is Promise:
                result = first.followed_by(kind, others, kwargs, in_place=in_place)
                if result is not None:
                    return result
        args, kwargs = tree_map_only(Promise, Promise.value, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Promise, Promise.value, (args, kwargs or {}))
        return func(*args, **kwargs)

    def followed_by(self, kind: str, args: Any, kwargs: Any, *, in_place: bool) -> Tensor | None:
        """Return the result with one more operation after it; None if that cannot be fused."""
        call, chain = self.call, self.call.conv.chain
        if self.held is not None or chain[call.done] != kind or torch.is_grad_enabled():
            return None
        found: dict[str, Any]
        if kind == "add":
            found = _added(call, *args, **kwargs)
        elif kind == "batch_norm":
            found = _normed(call, dict(zip(_OF_NORM, args, strict=False)) | kwargs)
        else:
            options = ACTIVATIONS[kind]
            given = options | dict(zip((*options, "inplace"), args, strict=False)) | kwargs
            in_place |= given.pop("inplace", False)
            algorithm, numbers = given.pop("approximate", ""), [*given.values()]
            found = {"activation": (*_AS_ONEDNN.get(kind, (kind, numbers)), algorithm)}
        if not found:
            return None
        after = call._replace(done=call.done + 1, **found)
        result: Tensor = after.run() if after.done == len(chain) else Promise.of(after)
        if in_place:
            self.held = result
        return result


def _normed(call: _Call, given: dict[str, Any]) -> dict[str, Any]:
    """Return the sources with those of a batch norm, as `F.batch_norm` takes them; empty if it differs."""
    norm, shape = [given.get(name) for name in _OF_NORM[:4]], call.form[0][1:2]
    sources = (*call.sources, *norm, given.get("eps", 1e-5))
    fits = norm[0] is not None and norm[1] is not None and not given.get("training")
    is_known = _is_made_of(call.checked.get(len(sources)), sources) or all(
        each is None or (each.shape == shape and _is_known(each)) for each in norm
    )
    return {"sources": sources} if fits and is_known else {}


def _is_made_of(made: _Weights | None, sources: tuple[Any, ...]) -> TypeGuard[_Weights]:
    return made is not None and all(map(operator.is_, made.sources, sources))


def _added(call: _Call, other: Any, *, alpha: float = 1) -> dict[str, Any]:
    other = other.value() if isinstance(other, Promise) else other
    shape, strides = call.form
    fits = type(other) is Tensor and other.shape == shape and other.stride() == strides
    if alpha == 1 and fits and other.dtype is call.x.dtype and other.is_cpu:
        return {"other": other, "version": call.version + _version(other)}
    return {}


def _is_known(tensor: Tensor) -> bool:
    """Return whether this is a plain tensor of a model on the CPU, whose changes can be seen."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_inference()
    return is_plain and tensor.is_cpu and tensor.dtype in _DTYPES


def _is_finite(values: Any) -> bool:
    """Return whether no tensor among these has a NaN or an infinity; False also if a sum is too large."""
    floats = [
        each for each in tree_leaves(values) if torch.is_tensor(each) and each.is_floating_point()
    ]
    return all(isfinite(each.sum(dtype=torch.float32)) for each in floats)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_same(seen: list[Any]) -> bool:
    """Return whether tensors hold what they held: `.data` and batch norms change values, but no version."""
    if any(t.data_ptr() != place or t._version != version for t, place, version, _, _ in seen):
        return False
    now, then = (torch.cat([each[index] for each in seen]) for index in (3, 4))
    return torch.equal(now, then)


def _is_plain() -> bool:
    """Return whether no trace, transform, autocast or mode of the dispatcher looks at each operation."""
    return _included() in _PLAIN and not torch.is_autocast_enabled("cpu")


def _is_observed() -> bool:
    """Return whether others look at each operation, or its gradient may be needed."""
    has_hooks = torchs_module._global_forward_hooks or torchs_module._global_forward_pre_hooks
    is_dual = torch.autograd.forward_ad._current_level >= 0
    return bool(has_hooks) or is_dual or torch.is_grad_enabled() or not _is_plain()


@lru_cache(maxsize=4096)
def _form(shape: Any, weight: Any, sizes: Any, added: Any) -> Any:
    """Return the shape and strides of a result; None if torch raises an error for these sizes."""
    stride, padding, dilation, groups, _ = sizes
    given = (torch.empty(shape, device="meta"), torch.empty(weight, device="meta"), None, stride)
    padded = (0,) * len(stride) if added is None else added
    with suppress(RuntimeError):
        y = torch.convolution(*given, padding, dilation, added is not None, padded, groups)
        if y.numel():
            return tuple(y.shape), canonical_stride(y.shape, CHANNELS_LAST[len(shape)])
    return None


class Fused(Rewritten):
    """A convolution that runs with what follows it, and on a packed weight.

    Helps: a batch norm, an activation and an addition need no pass over memory of their own. oneDNN reorders
    no weight at a call: the fewer pixels for a large weight, the more that is.
    Hurts: the packed weights need memory beside the Parameters.
    Source: torch's inductor uses the same operators; `mkldnn::_convolution_pointwise`.
    """

    rewritten_as = "fused"
    chain: tuple[str, ...] = ()
    """What follows: a `batch_norm`, then `add`, and an activation."""

    def served(self, x: Tensor, weight: Any, bias: Any) -> Tensor | None:
        """Return the result or a promise of it; None if this call is for torch's code."""
        if torch.compiler.is_compiling() or type(x) is not Tensor:
            return None
        checked = _NOW.checked[-1].get(self)
        if not (_is_plain() if checked else self.is_ready() and not _is_observed()):
            return None
        is_own = weight is self._parameters["weight"] and bias is self._parameters["bias"]
        if not (is_own and x.dtype is weight.dtype and x.is_cpu):
            return None
        (_, last), made = checked or (_ready(self), {})
        shapes, strides, form = last[0]
        if (x.shape, weight.shape) != shapes or x.stride() != strides:
            rank = x.dim()
            if rank != weight.dim() or not x.is_contiguous(memory_format=FORMATS[rank]):
                return None
            added = self.output_padding if self.transposed else None
            form = _form(x.shape, weight.shape, self.chosen_for, added)
            if form is None:
                return None
            x = with_exact_strides(x)
            last[0] = ((x.shape, weight.shape), x.stride(), form)
        call = _Call(self, x, _version(x), form, made, (weight, bias))
        return Promise.of(call) if self.chain and checked else self.computed(call)

    def is_ready(self) -> bool:
        """Return whether it is as it was when it was fused, in evaluation mode, and no hook looks at it."""
        return _is_whole(self) and sizes_of(self) == self.chosen_for

    def computed(self, call: _Call) -> Tensor:
        """Return the result of a call, with what follows it."""
        name, *options = call.activation
        checked = call.checked.get(len(call.sources))
        made = checked if _is_made_of(checked, call.sources) else self._weights(call)
        _, _, weight, bias, geometry, finite = made
        if not finite:  # here and in what follows in this part, torch runs what may hide NaN
            _NOW.checked[-1] = {}
            if hides := _HIDE_NAN.get(name):
                return hides(self.computed(call._replace(activation=_NO_ACTIVATION)), *options[0])
        kind = "transpose_pointwise" if self.transposed else "pointwise"
        if call.other is None:
            run = _OPERATORS[f"_convolution_{kind}.default"]
            y: Tensor = run(call.x, weight, bias, *geometry, name, *options)
        else:
            run = _OPERATORS["_convolution_pointwise.binary"]
            after = None if name == "none" else name
            y = run(call.x, call.other, weight, bias, *geometry, "add", 1.0, after, [], None)
        return y

    def _weights(self, call: _Call) -> _Weights:
        """Return the weights for a call: those that were made, if their sources are the same."""
        sources, (made_before, _) = call.sources, _ready(self)
        made = made_before.get(len(sources))
        if _is_made_of(made, sources) and _is_same(made.seen):
            return made
        both: Any = (each if each is None else each.detach() for each in sources[:2])
        weight, bias = both
        if sources[2:]:
            wide = (each.detach().float() if torch.is_tensor(each) else each for each in sources)
            w, b, mean, var, scale, shift, eps = wide
            fold: Any = fuse_conv_bn_weights
            both = fold(w, b, mean, var, eps, scale, shift, self.transposed)
            weight, bias = (each.detach().to(weight.dtype) for each in both)
        added = ([*self.output_padding],) if self.transposed else ()
        geometry = ([*self.padding], *added, [*self.stride], [*self.dilation], self.groups)
        finite = _is_finite((weight, bias))
        weight = weight.contiguous(memory_format=FORMATS[weight.dim()])
        kind = "transpose_weight" if self.transposed else "weight"
        reorder = _OPERATORS[f"_reorder_convolution_{kind}.default"]
        weight = reorder(weight, *geometry, [*call.x.shape])
        made = _Weights(sources, _seen(sources), weight, bias, geometry, finite)
        made_before[len(sources)] = made
        return made


def _is_whole(module: nn.Module) -> bool:
    """Return whether a module in evaluation mode has plain tensors that it holds, and no hook."""
    if module.training or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return weight is not None and _is_known(weight) and (bias is None or _is_known(bias))


def _seen(sources: tuple[Any, ...]) -> list[Any]:
    """Return each tensor with what shows whether it has changed since."""
    seen = []
    for each in filter(torch.is_tensor, sources):
        held = each.untyped_storage().nbytes() // each.itemsize - each.storage_offset()
        head = each.detach().as_strided((min(each.numel(), _HEAD, held),), (1,))
        seen.append((each, each.data_ptr(), each._version, head, head.clone()))
    return seen


def _ready(conv: nn.Module) -> _Ready:
    return _READY.get(conv) or _READY.setdefault(conv, ({}, [(None, None, None)]))


class FusedConv2d(Fused, nn.Conv2d):
    """torch's Conv2d with what follows it."""


class FusedConv3d(Fused, nn.Conv3d):
    """torch's Conv3d with what follows it."""


class _Transposed(Fused):
    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
        result = None if args or kwargs else self.served(input, self.weight, self.bias)
        return super().forward(input, *args, **kwargs) if result is None else result


class FusedConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    """torch's ConvTranspose2d with what follows it."""


class FusedConvTranspose3d(_Transposed, nn.ConvTranspose3d):
    """torch's ConvTranspose3d with what follows it."""


class FusedLinear(nn.Linear):
    """torch's Linear on a packed weight.

    Helps: wide layers, as in vision transformers: 0.84 to 0.96 of the time, on one thread of an AMD EPYC.
    Hurts: as `Fused`; one row takes 1.02 of the time. Source: as `Fused`; `mkldnn::_linear_pointwise`.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        x, weight, bias = input, self.weight, self.bias
        is_plain = type(x) is Tensor and x.is_cpu and not torch.compiler.is_compiling()
        is_ours = is_plain and _is_whole(self) and not _is_observed()
        fits = x.dtype is weight.dtype and x.dim() > 1 and x.numel()
        if not (is_ours and fits and x.shape[-1] == weight.shape[1]):
            return super().forward(x)
        sources, (held, _) = (weight, bias), _ready(self)
        made = held.get(2)
        if not (_is_made_of(made, sources) and _is_same(made.seen)):
            reorder = _OPERATORS["_reorder_linear_weight.default"]
            packed = reorder(weight.detach().contiguous(), x.numel() // x.shape[-1])
            made = held[2] = _Weights(sources, _seen(sources), packed, bias, (), True)
        y: Tensor = _OPERATORS["_linear_pointwise.default"](x, made.weight, bias, *_NO_ACTIVATION)
        return y


class _LinearFusion(SwapClass):
    """Pack the weights of wide layers: others are not faster."""

    step: ClassVar[str] = STEP

    def concerns(self, module: Any) -> bool:
        return super().concerns(module) and module.in_features * module.out_features >= _WIDE


class _Fusion(Rewrite):
    step: ClassVar[str] = STEP
    phrase = "fused"

    def mismatch(self, module: Any) -> str:
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            return f"padding {module.padding} with {module.padding_mode} is not a number of zeros"
        if (is_rewritten(module) and not self.is_repaired(module)) or "weight" not in vars(module)[
            "_parameters"
        ]:
            return "it runs as another operation, or computes its weight"
        if module.transposed and module.groups > 1:
            return f"groups {module.groups} of a transposed convolution are not 1"
        return fault_in_2d(module)

    def undo(self, module: nn.Module) -> None:
        super().undo(module)
        vars(module).pop("chain", None)


LINEAR = _LinearFusion("fused_linear", FusedLinear)
FUSION = _Fusion("fused", FusedConv2d, FusedConv3d, FusedConvTranspose2d, FusedConvTranspose3d)


class Around(NotScriptable):
    """A hook before and after the forward of a part that was traced: inside, convolutions give promises."""

    step = STEP

    @classmethod
    def is_on(cls, part: nn.Module) -> bool:
        return any(isinstance(each, cls) for each in part._forward_hooks.values())

    def __call__(self, part: nn.Module, args: Any, kwargs: Any, *output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        if output:
            _NOW.checked = _NOW.checked[:-1] or [{}]
            return tree_map_only(Promise, Promise.value, output[0])
        is_fused = not _is_observed() and _is_finite((args, kwargs))
        _NOW.checked.append(_check(part) if is_fused else {})
        return None


def _check(part: nn.Module) -> dict[nn.Module, tuple[_Ready, dict[int, _Weights]]]:
    """Return what is ready in a part: nothing with a hook in it, as that may keep a promise."""
    if (inner := _INSIDE.get(part)) is None:
        inner = _INSIDE[part] = [*part.modules()][1:]
    if any(each._forward_hooks or each._forward_pre_hooks for each in inner):
        return {}
    ready = {each: _ready(each) for each in inner if isinstance(each, Fused) and each.is_ready()}
    weights = [each for made, _ in ready.values() for each in made.values()]
    valid = {*map(id, weights)}
    if weights and not _is_same([each for one in weights for each in one.seen]):
        valid = {id(each) for each in weights if _is_same(each.seen)}
    if not all(each.finite for each in weights if id(each) in valid):
        return {}
    return {
        conv: (one, {n: each for n, each in one[0].items() if id(each) in valid})
        for conv, one in ready.items()
    }
