"""Input formatting: what is cast, what is restrided, which containers are gone into, and attaching it."""

import collections
import copy
import dataclasses
import types
from typing import NamedTuple

import pytest
import torch
from torch import nn

from prepare.core.forward.input_formatter import FormatHook, Formatter
from prepare.core.model.memory_format import canonical_stride
from prepare.pipeline import Pipeline


def formatted(batch, **options):
    return Pipeline.from_config({"input_format": options}).format(batch)


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    length: int = dataclasses.field(init=False, default=3)


IMAGE = torch.randn(2, 3, 4, 4)


@pytest.mark.parametrize(
    ("batch", "image"),
    [
        (IMAGE, lambda b: b),
        ({"x": IMAGE, "n": 1}, lambda b: b["x"]),
        (collections.OrderedDict(x=IMAGE), lambda b: b["x"]),
        (collections.UserDict(x=IMAGE), lambda b: b["x"]),
        (types.MappingProxyType({"x": IMAGE}), lambda b: b["x"]),
        ([IMAGE, "text"], lambda b: b[0]),
        ((None, IMAGE), lambda b: b[1]),
        (Pair(IMAGE, torch.ones(2)), lambda b: b.image),
        (Sample(IMAGE), lambda b: b.image),
        ({"deep": [({"x": Pair(Sample(IMAGE), 1)},)]}, lambda b: b["deep"][0][0]["x"].image.image),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_container_is_gone_into_and_keeps_its_type(batch, image):
    result = formatted(batch, memory_format="by_rank", dtype="bfloat16")
    assert type(result) is type(batch)
    assert image(result).dtype is torch.bfloat16
    assert image(result).stride() == canonical_stride((2, 3, 4, 4), "channels_last")
    assert IMAGE.dtype is torch.float32, "the caller's own batch is never written into"


def test_integers_and_booleans_are_never_cast():
    ids, mask = torch.tensor([2049, 100001]), torch.tensor([True])
    phase = torch.randn(2, dtype=torch.complex64)
    result = formatted([ids, mask, phase, torch.ones(1, 1)], dtype="float16", include=["*"])
    assert result[0] is ids
    assert result[1] is mask
    assert result[2] is phase
    assert result[3].dtype is torch.float16


@pytest.mark.parametrize(
    "memory_format", ["contiguous", "channels_last", "channels_last_3d", "by_rank"]
)
@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4, 5, 6])
def test_formats_go_by_rank_and_the_rest_is_untouched(memory_format, rank):
    shape = (2, 3, 4, 5, 6, 7)[:rank]
    # Neither contiguous nor channels-last to begin with.
    tensor = torch.randn(shape[::-1]).permute(list(reversed(range(rank))))
    wanted = {
        "contiguous": "contiguous",
        "channels_last": "channels_last" if rank == 4 else None,
        "channels_last_3d": "channels_last_3d" if rank == 5 else None,
        "by_rank": {4: "channels_last", 5: "channels_last_3d"}.get(rank),
    }[memory_format]
    result = formatted(tensor, memory_format=memory_format)
    if wanted is None:
        assert result is tensor
    else:
        assert result.stride() == canonical_stride(shape, wanted)
    assert torch.equal(result, tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(torch.randn(8, 8, 3).numpy()).permute(2, 0, 1).unsqueeze(0),
        lambda: torch.randn(8, 8, 3).permute(2, 0, 1)[None],
        lambda: torch.randn(2, 8, 8, 3).permute(0, 3, 1, 2)[0][None],
        lambda: torch.randn(1, 1, 8, 8),
    ],
)
def test_batch_1_inputs_get_canonical_strides(make):
    tensor = make()
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    result = formatted(tensor, memory_format="channels_last")
    assert result.stride() == canonical_stride(tensor.shape, "channels_last")


def test_an_unknown_container_of_tensors_is_left_alone_and_reported():
    class Batch:
        def __init__(self):
            self.image = torch.ones(1)

    batch = Batch()
    with pytest.warns(UserWarning, match="the tensors in a .*Batch stay as they are"):
        assert formatted(batch, dtype="float16") is batch


class Keywords(nn.Module):
    def forward(self, first, *, image, other=None):
        return first.dtype, image.dtype, image.stride(), other


def test_attached_formatting_covers_positional_and_keyword_arguments():
    options = {"dtype": "bfloat16", "memory_format": "by_rank", "attach": True}
    model = Pipeline.from_config({"input_format": options}).apply(Keywords())
    first, image, stride, other = model(IMAGE, image=IMAGE, other={"n": 3})
    assert (first, image, other) == (torch.bfloat16, torch.bfloat16, {"n": 3})
    assert stride == canonical_stride(IMAGE.shape, "channels_last")


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, argument):
        return self.function(x, argument)


def with_hook(function):
    model = Calls(function)
    FormatHook(Formatter(dtype=torch.bfloat16, formats=((4, "channels_last"),))).install(model)
    return model


WRITES = {
    "tensor": (lambda: IMAGE.clone(), lambda x, given: given.mul_(2)),
    "nested": (
        lambda: {"deep": [({"x": IMAGE.clone()},)]},
        lambda x, g: g["deep"][0][0]["x"].add_(1),
    ),
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_write_into_a_copied_argument_is_said(kind):
    make, function = WRITES[kind]
    given, before = make(), copy.deepcopy(make())
    with pytest.warns(UserWarning, match=r"pipeline\.format\(batch\)"):
        with_hook(function)(IMAGE, given)
    assert str(given) == str(before)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_that_raises_leaves_the_batch_of_the_caller(error):
    def stop(x, batch):
        raise error

    batch = {"x": IMAGE}
    with pytest.raises(error):
        with_hook(stop)(IMAGE, batch)
    assert batch["x"] is IMAGE


@pytest.mark.parametrize("shape", [(2, 32, 32, 3), (1, 16, 24, 1), (2, 8, 9, 10, 4)])
def test_a_batch_with_its_channels_last_in_its_shape_is_left_alone(shape):
    batch = torch.randn(shape)
    assert formatted(batch, memory_format="by_rank") is batch
    assert formatted(batch, memory_format="by_rank", dtype="bfloat16").is_contiguous()
    moved = batch.movedim(-1, 1).contiguous()
    assert not formatted(moved, memory_format="by_rank").is_contiguous() or shape[-1] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_mask_values_become_those_of_the_new_dtype(dtype, source):
    largest = torch.finfo(getattr(torch, dtype)).max
    low, high = torch.finfo(source).min, torch.finfo(source).max
    mask = torch.tensor([[low, high, 0.5, -torch.inf, torch.nan]]).to(source)
    for given in (mask, mask[None, None].expand(1, 2, 4, 5)):
        found = formatted(given, dtype=dtype, memory_format="channels_last").float()
        found = found.flatten()[:5]
        assert found[:4].tolist() == [-largest, largest, 0.5, -torch.inf]
        assert found[4].isnan()
    traced = torch.func.vmap(lambda row: formatted(row, dtype=dtype))(mask[None])
    assert traced[0, 0].isfinite().sum() == 3


@pytest.mark.parametrize("value", [70000.0, -1e9])
def test_a_tensor_that_the_dtype_cannot_hold_stays_and_is_named(value):
    batch = {"boxes": torch.tensor([[value, 1.5]]), "image": IMAGE}
    with pytest.warns(UserWarning, match=r"boxes .*float16.*exclude"):
        found = formatted(batch, dtype="float16")
    assert found["boxes"] is batch["boxes"]
    assert found["image"].dtype is torch.float16
    assert formatted(batch, dtype="bfloat16")["boxes"].dtype is torch.bfloat16


NOT_CAST = {
    "scalar": torch.tensor(998.4),
    "vector": torch.tensor([998.4, 3.3]),
    "float64": torch.full((2, 2), 1737012345.25, dtype=torch.float64),
    "float64 image": IMAGE.double(),
}


@pytest.mark.parametrize("kind", NOT_CAST)
def test_times_and_scales_keep_their_digits_unless_named(kind):
    given = NOT_CAST[kind]
    assert formatted({"t": given}, dtype="bfloat16")["t"] is given
    included = formatted({"t": given}, dtype="bfloat16", include=["t"])
    assert included["t"].dtype is torch.bfloat16


BOXES = torch.tensor([[13.3, 441.7, 1021.4, 1333.9]])
NESTED = {"image": IMAGE, "targets": [{"boxes": BOXES, "masks": IMAGE}, {"boxes": BOXES}]}


@pytest.mark.parametrize(
    "pattern", ["targets", "targets.*", "targets.0", "targets.*.boxes", "*boxes", "0.boxes"]
)
def test_a_pattern_names_an_argument_or_what_holds_it(pattern):
    found = formatted(NESTED, dtype="bfloat16", exclude=[pattern])
    assert found["targets"][0]["boxes"] is BOXES
    assert found["image"].dtype is torch.bfloat16
    assert formatted(NESTED, dtype="bfloat16", exclude=["box"])["targets"][0]["boxes"] is not BOXES


def test_arguments_without_a_name_are_counted():
    class Star(nn.Module):
        def forward(self, x, *more, **named):
            return [each.dtype for each in (x, *more, *named.values())]

    step = {"dtype": "bfloat16", "attach": True, "exclude": ["1", "y"]}
    model = Pipeline.from_config({"input_format": step}).apply(Star())
    found = model(IMAGE, IMAGE.clone(), IMAGE.clone(), y=IMAGE.clone())
    assert found == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]


def test_exclude_wins_over_include():
    step = {"dtype": "bfloat16", "include": ["*"], "exclude": ["t"]}
    found = formatted({"t": torch.ones(2, 2), "u": torch.ones(2)}, **step)
    assert (found["t"].dtype, found["u"].dtype) == (torch.float32, torch.bfloat16)


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.time = nn.Conv2d(3, 4, 1), nn.Linear(1, 4)

    def forward(self, x, timestep=None, *, boxes=None):
        y = self.conv(x)
        return y if timestep is None else y + self.time(timestep)[..., None, None]


@pytest.mark.parametrize(
    ("step", "named"),
    [
        ({}, ["timestep"]),
        ({"exclude": ["x"]}, ["x", "timestep"]),
        ({"exclude": ["boxes"]}, ["timestep", "boxes"]),
    ],
)
def test_a_forward_that_fails_for_a_dtype_names_the_argument(step, named):
    steps = {"half": {"dtype": "bfloat16"}, "input_format": {"attach": True, **step}}
    model = Pipeline.from_config(steps).apply(Timed())
    with pytest.raises(RuntimeError, match="dtype|type") as raised:
        model(IMAGE, torch.ones(1), boxes=BOXES)
    (note,) = raised.value.__notes__
    assert all(name in note.partition("exclude")[0] for name in named)
    steps["input_format"].update(include=named, exclude=[])
    Pipeline.from_config(steps).apply(model)
    assert model(IMAGE, torch.ones(1), boxes=BOXES).dtype is torch.bfloat16


def test_patterns_hold_in_a_compiled_call():
    class Returns(nn.Module):
        def forward(self, x, targets):
            return x + 1, targets["boxes"] * 1

    step = {"dtype": "bfloat16", "attach": True, "exclude": ["targets.boxes"]}
    compiled = {"input_format": step, "compile": {"backend": "aot_eager", "fullgraph": True}}
    torch._dynamo.reset()
    model = Pipeline.from_config(compiled).apply(Returns())
    x, boxes = model(IMAGE, {"boxes": BOXES})
    assert (x.dtype, boxes.dtype) == (torch.bfloat16, torch.float32)
