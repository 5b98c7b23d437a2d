"""Describe a model and the global state of the process down to each bit, independently of the package."""

import random
from collections import deque

import numpy as np
import torch
from torch import nn


def fingerprint(value, seen=None):
    """Return nested tuples that are equal if and only if nothing has changed, identities included."""
    seen = {} if seen is None else seen
    if isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device | None):
        return repr(value)
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    inner = []
    if isinstance(value, torch.Tensor):
        gradient = value.grad if value.is_leaf else None
        inner = [memory_of(each) for each in (value, gradient) if each is not None]
    elif isinstance(value, torch.Generator):
        inner = [value.get_state().tolist()]
    elif isinstance(value, random.Random):
        inner = [value.getstate()]
    elif isinstance(value, np.random.Generator):
        inner = [repr(value.bit_generator.state)]
    elif isinstance(value, dict):
        inner = [(repr(key), fingerprint(item, seen)) for key, item in value.items()]
    elif isinstance(value, list | tuple | deque):
        inner = [fingerprint(item, seen) for item in value]
    elif isinstance(value, set):
        inner = sorted(map(repr, value))
    elif hasattr(value, "__closure__"):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        inner = [fingerprint(item, seen) for item in cells]
    elif isinstance(value, nn.Module) or type(value).__module__ in ("stateful_nets", "types"):
        held = vars(value) if hasattr(value, "__dict__") else {}
        inner = [(key, fingerprint(item, seen)) for key, item in held.items()]
    return type(value).__name__, id(value), inner


def memory_of(tensor):
    """Return where a tensor lies, and its bytes."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    place = tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype, tensor.requires_grad
    return place, raw


def difference(first, second, path=""):
    """Return where two fingerprints differ first; empty if they are equal."""
    if first == second:
        return ""
    if (
        type(first) is type(second)
        and isinstance(first, list | tuple)
        and len(first) == len(second)
    ):
        pairs = enumerate(zip(first, second, strict=True))
        return next(filter(None, (difference(a, b, f"{path}.{index}") for index, (a, b) in pairs)))
    return f"{path}: {first!s:.300} is not {second!s:.300}"


def process_state():
    """Return the global state that a forward may change."""
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        repr(np.random.get_state()),  # noqa: NPY002
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_deterministic_debug_mode(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
    )
