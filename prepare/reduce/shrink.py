"""Yield simpler variants of a call: fewer samples, channels and pixels, default options, plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prepare.reduce.records import ModuleCall

_LEAST_OF_NORM = 8
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
# The arguments that count the channels of the input.
_CHANNELS = ("in_channels", "num_features", "num_channels", "num_parameters")


def variants(call: ModuleCall) -> Iterator[ModuleCall]:
    """Yield simpler variants, the boldest first; a variant may be one that torch refuses."""
    for simpler in (*_plain_values(call), *_plain_modes(call), *_fewer_samples(call),
                    *_fewer_pixels(call), *_fewer_channels(call), *_fewer_options(call)):  # fmt: skip
        # The gradients of a norm over fewer numbers are all rounding: two of them always become 1 and -1.
        if "Norm" not in call.kind or prod(simpler.shape[2:]) * simpler.shape[0] >= _LEAST_OF_NORM:
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
