"""Canonical strides and satisfied formats are exactly torch's."""

import itertools

import pytest
import torch

from prepare.core.model.memory_format import FORMATS, canonical_stride, satisfied, span, takes

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


def test_ambiguous_channels_last_strides_are_not_canonical():
    tensor = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)[0][None]
    assert "channels_last" in satisfied(tensor.shape, tensor.stride())
    tensor = torch.from_numpy(torch.randn(8, 8, 3).numpy()).permute(2, 0, 1).unsqueeze(0)
    assert "channels_last" in satisfied(tensor.shape, tensor.stride())
    assert tensor.stride() != canonical_stride(tensor.shape, "channels_last")


def test_a_format_of_another_rank_is_refused():
    with pytest.raises(ValueError, match="channels_last needs 4 dimensions, got 5"):
        canonical_stride((1, 2, 3, 4, 5), "channels_last")


def test_span_counts_the_storage_between_first_and_last():
    assert span((2, 3), (3, 1)) == 6
    assert span((2, 3), (0, 1)) == 3
    assert span((0, 3), (3, 1)) == 0
