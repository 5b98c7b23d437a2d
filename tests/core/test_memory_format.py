"""Canonical strides and satisfied formats are exactly torch's."""

import itertools

import pytest
import torch

from prepare.core.model.memory_format import FORMATS, canonical_stride, satisfied, takes

TORCH = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
SHAPES = [shape for rank in range(6) for shape in itertools.product((0, 1, 2, 3), repeat=rank)]


@pytest.mark.parametrize("name", FORMATS)
def test_canonical_strides_are_those_of_a_new_tensor(name):
    for shape in SHAPES:
        if takes(name, len(shape)):
            fresh = torch.empty(shape, memory_format=TORCH[name], device="meta")
            assert canonical_stride(shape, name) == fresh.stride()


@pytest.mark.parametrize("made", FORMATS)
def test_satisfied_answers_as_is_contiguous_does(made):
    for shape in SHAPES:
        if takes(made, len(shape)):
            tensor = torch.empty(shape, memory_format=TORCH[made], device="meta")
            asked = [f for f in FORMATS if takes(f, len(shape))]
            wanted = tuple(f for f in asked if tensor.is_contiguous(memory_format=TORCH[f]))
            assert satisfied(shape, tensor.stride()) == wanted


def test_a_format_of_another_rank_is_refused():
    with pytest.raises(ValueError, match="channels_last needs 4 dimensions, got 5"):
        canonical_stride((1, 2, 3, 4, 5), "channels_last")
