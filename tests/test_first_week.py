"""What an ordinary program does to us in its first week: each program once with us, once without.

A row is a name and a program: a function of `prepare`, a function that prepares a model or, without us, returns
it as it is. A program asserts its own right values. `with_us` tells it what more it may ask for.
"""

from __future__ import annotations

import copy
import gc
import re
import resource
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from prepare.core.forward.call import call_of
from prepare.core.forward.unchanged import unchanged
from prepare.errors import KnownIssueWarning
from prepare.frameworks.outside import Outside
from prepare.pipeline import Pipeline, pipeline, relayout
from prepare.stages.verify import verify
from prepare.steps import input_format

PROGRAMS = {}


def program(function):
    """Add a row to the table."""
    PROGRAMS[function.__name__] = function
    return function


class Us:
    """`prepare.prepare` and `Pipeline.format`; without us they return what they get."""

    def __init__(self, *, with_us):
        self.with_us = with_us

    def prepare(self, model, *args, **options):
        return pipeline.prepare(model, *args, **options) if self.with_us else model

    def apply(self, steps, model, **options):
        return Pipeline.from_config(steps).apply(model, **options) if self.with_us else model

    def drift(self, steps, model, optimizer):
        of = Pipeline.from_config(steps)
        return of.check(model, optimizer=optimizer) if self.with_us else []

    def format(self, steps, batch):
        return Pipeline.from_config(steps).format(batch) if self.with_us else batch


# ------------------------------------------------------------------ an input is not an activation

BFLOAT16 = {"half": {"dtype": "bfloat16"}, "input_format": {}}
BOXES = torch.tensor([[13.3, 441.7, 1021.4, 1333.9], [1.7, 2.3, 700.1, 900.9]])


class Detector(nn.Module):
    """Pools the features in each box, and returns the boxes in pixels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 2)

    def forward(self, images, targets):
        features = self.stem(images).mean((2, 3))
        return self.head(features), [each["boxes"] / each["scale"] for each in targets]


@program
def boxes_in_nested_lists_keep_their_pixels(us):
    targets = [{"boxes": BOXES, "scale": torch.tensor(3.3)} for _ in range(2)]
    batch = {"images": torch.randn(2, 3, 16, 16), "targets": targets}
    model = us.prepare(Detector().eval(), batch, dtype="bfloat16")
    scores, boxes = model(**batch)
    assert all(torch.equal(each, BOXES / 3.3) for each in boxes)
    assert scores.dtype == (torch.bfloat16 if us.with_us else torch.float32)


@program
def a_time_in_float64_of_a_batch_keeps_its_seconds(us):
    batch = {"image": torch.randn(2, 3, 8, 8), "time": torch.tensor([1737012345.25]).double()}
    batch["time"] += 0.125
    found = us.format(BFLOAT16, batch)
    assert found["time"].item() == batch["time"].item()
    assert found["image"].dtype == (torch.bfloat16 if us.with_us else torch.float32)


class Diffusion(nn.Module):
    """Embeds its time in float32, as diffusers does, and casts the embedding."""

    def __init__(self):
        super().__init__()
        self.conv, self.time = nn.Conv2d(4, 8, 1), nn.Linear(8, 8)

    def forward(self, sample, timestep, guidance=None):
        angles = timestep[:, None].float() * torch.exp(-torch.arange(4.0))
        embedding = torch.cat([angles.sin(), angles.cos()], 1)
        self.seen = embedding if guidance is None else embedding * guidance
        features = self.conv(sample)
        return features + self.time(self.seen.to(features.dtype))[..., None, None]


@program
def a_timestep_is_embedded_as_it_is(us):
    model = us.prepare(Diffusion().eval(), dtype="bfloat16")
    model(torch.randn(2, 4, 8, 8), torch.tensor([998.4, 3.3]))
    assert torch.equal(model.seen[:, 0], torch.tensor([998.4, 3.3]).sin())


@program
def a_timestep_of_two_dimensions_is_found_by_a_batch(us):
    class OfColumns(Diffusion):
        def forward(self, sample, timestep):
            return super().forward(sample, timestep[:, 0])

    batch = (torch.randn(2, 4, 8, 8), torch.tensor([[998.4], [3.3]]))
    model = us.prepare(OfColumns().eval(), batch, dtype="bfloat16")
    model(*batch)
    assert torch.equal(model.seen[:, 0], batch[1][:, 0].sin())
    model(batch[0], timestep=batch[1])
    assert torch.equal(model.seen[:, 0], batch[1][:, 0].sin())


@dataclass
class Sample:
    image: torch.Tensor
    target: torch.Tensor
    weights: tuple


class Item(NamedTuple):
    image: torch.Tensor
    target: torch.Tensor


@program
def a_dataclass_and_a_named_tuple_keep_their_vectors(us):
    image, target = torch.randn(2, 3, 8, 8), torch.tensor([998.4, 1e-3])
    sample = us.format(BFLOAT16, Sample(image, target, (target, torch.tensor(1333.9))))
    item = us.format(BFLOAT16, Item(image, target))
    assert sample.target is item.target is target
    assert sample.weights[1].item() == torch.tensor(1333.9).item()


@program
def an_output_of_transformers_is_a_batch(us):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    loss = torch.tensor(998.4)
    output = outputs.ImageClassifierOutput(loss=loss, logits=torch.randn(2, 8))
    found = us.format(BFLOAT16, output)
    assert type(found) is type(output)
    assert found.loss is loss


@program
def a_number_that_float16_cannot_hold_stays(us):
    depth = torch.tensor([[70000.0, 3.5]])
    batch = {"image": torch.randn(1, 3, 8, 8), "depth": depth}
    steps = {"half": {"dtype": "float16"}, "input_format": {}}
    assert us.format(steps, batch)["depth"] is depth


@program
def a_mask_of_the_least_number_stays_a_mask(us):
    mask = torch.zeros(1, 1, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    mask = mask.clamp(min=torch.finfo(torch.float32).min)
    found = us.format({"half": {"dtype": "float16"}, "input_format": {}}, mask)
    assert found.softmax(-1).isfinite().all()


@pytest.mark.parametrize("attached", [True, False])
def test_verification_counts_the_rounding_of_a_time(attached):
    model = Diffusion().eval()
    model.time.weight.data *= 5
    batch, statuses = (torch.randn(2, 4, 8, 8), torch.tensor([998.4, 3.3])), []
    for include in ([], ["timestep"]):
        steps = {"half": {"dtype": "bfloat16"}}
        steps["input_format"] = {"include": include, "attach": attached}
        pipeline, prepared = Pipeline.from_config(steps), copy.deepcopy(model)
        pipeline.apply(prepared)
        statuses.append(verify(model, prepared, batch, pipeline=pipeline).status)
    assert statuses == ["pass", "fail"]


def test_a_run_formats_arguments_by_their_names():
    step = {"dtype": "bfloat16", "include": ["timestep"]}
    pipeline = Pipeline.from_config({"input_format": step})
    call = call_of((torch.randn(2, 4, 8, 8), torch.tensor([998.4, 3.3])))
    assert pipeline.format_call(call, Diffusion()).args[1].dtype == torch.bfloat16
    assert pipeline.formatted(call, Diffusion()).args[1].dtype == torch.bfloat16


def test_an_attached_format_does_not_hide_what_a_layer_needs():
    batch = (torch.randn(2, 4, 8, 8), torch.tensor([998.4, 3.3]))
    pipeline = Pipeline.from_config({**BFLOAT16, "input_format": {"attach": True}})
    model = pipeline.apply(Diffusion().eval())
    again = Pipeline.from_config({**BFLOAT16, "input_format": {"attach": True}})
    again.apply(model, example=batch)
    assert again.to_config()["input_format"]["exclude"] == []
    assert model(*batch).dtype == torch.bfloat16


def unet():
    diffusers = pytest.importorskip("diffusers")
    kinds = {"down_block_types": ["CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D"]}
    model = diffusers.UNet2DConditionModel(
        8, 4, 4, block_out_channels=[32], norm_num_groups=8, cross_attention_dim=16,
        attention_head_dim=8, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=64, **kinds,
    )  # fmt: skip
    added = {"text_embeds": torch.randn(1, 16), "time_ids": torch.full((1, 6), 1023.5)}
    batch = {"sample": torch.randn(1, 4, 8, 8), "timestep": torch.tensor(998.4)}
    batch |= {"encoder_hidden_states": torch.randn(1, 6, 16), "added_cond_kwargs": added}
    return model.eval(), batch


def flux():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    batch = {"hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 6, 16)}
    batch |= {"pooled_projections": torch.randn(1, 16), "timestep": torch.tensor([0.9984])}
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)) * 100.3
    batch |= {"img_ids": ids, "txt_ids": torch.zeros(6, 3), "guidance": torch.tensor([3.57])}
    return model.eval(), batch


def is_not_further_off_than_torchs_cast(us, make):
    model, batch = make()
    low = copy.deepcopy(model).to(torch.bfloat16)
    cast = {
        k: v.bfloat16() if isinstance(v, torch.Tensor) and k not in TIMES else v
        for k, v in batch.items()
    }
    prepared = us.prepare(copy.deepcopy(model), batch, dtype="bfloat16")
    with torch.no_grad():
        right = model(**batch).sample
        given = right.sub(prepared(**batch).sample).norm()
        torchs = right.sub(low(**cast).sample).norm() if us.with_us else given
    assert given <= 1.5 * torchs


TIMES = ("timestep", "guidance", "img_ids")
for each in (unet, flux):

    def run(us, make=each):
        is_not_further_off_than_torchs_cast(us, make)

    PROGRAMS[f"diffusers_{each.__name__}_in_bfloat16"] = run


# ------------------------------------------------------------------ a network in another precision

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))


def comes_as(us, stored, wanted):
    """Prepare a checkpoint in one dtype for another: as torch's own cast, but norms are in float32."""
    model = network().eval().to(DTYPES[stored])
    right = copy.deepcopy(model).to(DTYPES[wanted])
    if us.with_us:
        us.prepare(model, dtype=wanted)
    else:
        model.to(DTYPES[wanted])
    low = wanted in ("float16", "bfloat16")
    for (name, found), other in zip(model.named_parameters(), right.parameters(), strict=True):
        kept = us.with_us and low and name.startswith("1.")
        assert found.dtype == (torch.float32 if kept else other.dtype)
        assert kept or torch.equal(found, other)
    image = torch.randn(2, 3, 8, 8)
    assert model(image if us.with_us else image.to(DTYPES[wanted])).dtype == DTYPES[wanted]


for stored in DTYPES:
    for wanted in DTYPES:

        def run(us, stored=stored, wanted=wanted):
            comes_as(us, stored, wanted)

        PROGRAMS[f"{stored}_to_{wanted}"] = run


@program
def a_network_of_several_dtypes_becomes_float32(us):
    model = network().eval()
    model[0].half()
    model[3].bfloat16()
    model = us.prepare(model, "channels_last", dtype="float32") if us.with_us else model.float()
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert model(torch.randn(2, 3, 8, 8)).dtype == torch.float32


@program
def what_half_keeps_of_a_float16_network_is_float32(us):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 4))
    steps = {"half": {"dtype": "bfloat16", "keep": ["2"]}, "input_format": {"attach": True}}
    model = us.apply(steps, model.half() if us.with_us else model)
    assert model[2].weight.dtype == torch.float32
    assert model(torch.randn(2, 3, 1, 1)).dtype == model[3].weight.dtype


class Own(nn.Module):
    """A class that says itself what must stay in float32, and casts what that gets."""

    _keep_in_fp32_modules = ["scale", "wide"]

    def __init__(self):
        super().__init__()
        self.wide, self.wide_too, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = self.wide(x.to(self.wide.weight.dtype)) * self.scale
        return self.out(self.wide_too(y.to(self.out.weight.dtype)))


@program
def a_class_keeps_its_modules_in_float32(us):
    for model, start in ((Own(), ""), (nn.Sequential(Own(), nn.Linear(4, 4)), "0.")):
        us.prepare(model, dtype="bfloat16")
        names = [n for n, p in model.named_parameters() if p.dtype == torch.float32]
        kept = [f"{start}scale", f"{start}wide.weight", f"{start}wide.bias"]
        assert names == kept or not us.with_us
        model(torch.randn(2, 4))


@program
def t5_keeps_its_wide_product_in_float32(us):
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=32, decoder_start_token_id=0, **sizes)
    model = us.prepare(transformers.T5EncoderModel(config).eval(), dtype="float16")
    wide = model.encoder.block[0].layer[1].DenseReluDense.wo.weight
    assert wide.dtype == torch.float32
    assert model(torch.tensor([[1, 2, 3]])).last_hidden_state.isfinite().all()


# ------------------------------------------------------------------------------- calls of ours

SEEN = []


class Stateful(nn.Module):
    """Keeps what a decoder, a cache of positions and a sampler keep between two calls."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, stride=4)
        self.past, self.tables, self.context = [], {}, SimpleNamespace(calls=0, last=None)
        self.draws = torch.Generator().manual_seed(0)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, batch):
        image = batch.pop("image")
        image -= 0.5
        batch["sizes"].append(image.shape)
        y = self.conv(image)
        self.tables.setdefault(y.shape, y.mean().item())
        self.past.append(y)
        self.context.calls += 1
        self.context.last, last = y, self.context.last
        self.mean += y.detach().float().mean((0, 2, 3))
        noise = torch.rand(1, generator=self.draws).to(y.dtype)
        return y + noise + self.mean[:, None, None].to(y.dtype) + (0 if last is None else last)


def calls_of_ours_leave_state(us, way, mode, **options):
    model, closed = Stateful().train(mode == "train"), []
    model.conv.register_forward_hook(lambda module, args, output: closed.append(output))
    model.conv.register_forward_hook(lambda module, args, output: SEEN.append(output))
    example = {"image": torch.rand(1, 3, 32, 32), "sizes": []}
    batch, kept = (example,), example["image"].clone()
    draws = model.draws.get_state()
    SEEN.clear()
    if way == "prepare":
        us.prepare(model, batch, **options)
    elif way == "apply":
        us.apply({"rewrite_conv": {}, **options}, model, example=batch)
    elif us.with_us:
        Pipeline.from_config({"rewrite_conv": {}, **options}).choose(model, batch)
    assert (model.past, model.tables, model.context.calls) == ([], {}, 0)
    assert model.context.last is None
    assert not model.mean.any()
    assert torch.equal(model.draws.get_state(), draws)
    assert (closed, SEEN) == ([], [])
    assert list(example) == ["image", "sizes"]
    assert example["sizes"] == []
    assert torch.equal(example["image"], kept)
    model({"image": example["image"].clone(), "sizes": []})
    assert (model.context.calls, len(model.past), len(closed), len(SEEN)) == (1, 1, 1, 1)


IN_STEPS = {"half": {"dtype": "bfloat16"}, "input_format": {"attach": True}}
LOW = {"prepare": {"dtype": "bfloat16"}, "apply": IN_STEPS, "choose": IN_STEPS}
for way, options in LOW.items():
    for mode in ("eval", "train"):
        for given in ({}, options):

            def run(us, way=way, mode=mode, given=given):
                calls_of_ours_leave_state(us, way, mode, **given)

            dtype = "bfloat16" if given else "float32"
            PROGRAMS[f"{way}_leaves_the_state_in_{mode}_and_{dtype}"] = run


class Interrupted(nn.Module):
    def __init__(self, item):
        super().__init__()
        self.conv, self.item, self.stop = nn.Conv2d(3, 3, 1), item, True

    def forward(self, *args, **kwargs):
        if self.stop:
            raise KeyboardInterrupt
        return self.conv(self.item(args, kwargs))


IMAGE = torch.randn(1, 3, 4, 4)
BATCHES = {
    "a_dict": lambda: (({"x": IMAGE},), {}, lambda args, kwargs: args[0]["x"]),
    "a_list": lambda: (([IMAGE],), {}, lambda args, kwargs: args[0][0]),
    "a_nested_dict": lambda: (({"x": [{"y": IMAGE}]},), {}, lambda args, _: args[0]["x"][0]["y"]),
    "keywords": lambda: ((), {"batch": {"x": IMAGE}}, lambda _, kwargs: kwargs["batch"]["x"]),
    "a_dataclass": lambda: ((Sample(IMAGE, IMAGE, ()),), {}, lambda args, _: args[0].image),
}
for kind, make_batch in BATCHES.items():

    def run(us, make_batch=make_batch):
        args, kwargs, item = make_batch()
        steps = {"half": {"dtype": "bfloat16"}, "input_format": {"attach": True}}
        model = us.apply(steps, Interrupted(item).eval())
        with pytest.raises(KeyboardInterrupt):
            model(*args, **kwargs)
        assert item(args, kwargs) is IMAGE
        model.stop = False
        assert [model(*args, **kwargs).shape for _ in range(3)] == [IMAGE.shape] * 3
        assert item(args, kwargs) is IMAGE

    PROGRAMS[f"an_interrupted_call_leaves_{kind}"] = run


@program
def choosing_keeps_few_activations(us):
    most = []

    def count(module, args):
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        sizes = {each.untyped_storage()._cdata for each in tensors if each.nbytes == x.nbytes}
        most.append(len(sizes))

    model = nn.Sequential(*[nn.Conv2d(8, 8, 1) for _ in range(20)]).eval()
    model[-1].register_forward_pre_hook(count)
    x = torch.randn(1, 8, 61, 67)
    with torch.no_grad():
        model(x)
    us.apply({"rewrite_conv": {}}, model, example=x)
    assert max(most) <= 5


def memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def loaded(path):
    return torch.load(path, mmap=True)


MAPPED = {
    "array": lambda path: pytest.importorskip("numpy").memmap(path, mode="r"),
    "tensor_of_a_checkpoint": loaded,
}
for kind, make_mapped in MAPPED.items():

    def run(us, kind=kind, make_mapped=make_mapped):
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(2**26)
            if make_mapped is loaded:
                torch.save(torch.zeros(2**24), file.name)
            model = nn.Linear(2, 2)
            model.data_set = SimpleNamespace(images=make_mapped(file.name))
            before = memory()
            with unchanged(model) if us.with_us else nullcontext():
                model(torch.ones(1, 2))
                assert memory() - before < 2**25
            del model

    PROGRAMS[f"a_mapped_{kind}_is_not_copied"] = run


# ------------------------------------------------------------------ who trains what

BEFORE = [*PROGRAMS]
LAST = {"conv2d_memory_format": {}, "repair_layout": {}}


def images(seed=1, channels=3):
    return torch.randn(2, channels, 12, 12, generator=torch.Generator().manual_seed(seed))


def net(channels=3, out=4):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, out, 3)
    )


def is_last(model):
    weight = next(m.weight for m in model.modules() if isinstance(m, nn.Conv2d))
    return weight.stride(1) == 1


def steps_of(model, optimizer, count=4, prepare=None):
    """Train some steps and return their losses; `prepare` is called after the second one."""
    losses = []
    for step in range(count):
        losses.append(train_step(optimizer, model(images(step)).square().mean()))
        if prepare and step == 1:
            optimizer.zero_grad()
            prepare()
    return losses


def train_step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@program
def a_gan_has_two_optimizers(us):
    generator, critic = net(8, 3), net(3, 1)
    pair = [torch.optim.Adam(each.parameters(), 1e-3) for each in (generator, critic)]
    losses = []
    for step in range(3):
        fake = generator(images(step, 8))
        of_critic = critic(fake.detach()).mean() - critic(images(9)[..., 2:, 2:]).mean()
        losses.append(train_step(pair[1], of_critic))
        losses.append(train_step(pair[0], -critic(fake).mean()))
        for optimizer in pair:
            optimizer.zero_grad()
        for each in (generator, critic):  # each is given both
            us.apply(LAST, each, optimizer=pair)
            assert not us.with_us or (is_last(each) and not us.drift(LAST, each, pair))
    return losses


@program
def a_frozen_backbone_is_trained_by_nobody(us):
    backbone, head = net().requires_grad_(False), net(4, 2)
    optimizer = torch.optim.AdamW(head.parameters(), fused=True)
    us.apply(LAST, backbone, optimizer=optimizer)
    assert not us.drift(LAST, backbone, optimizer)
    return steps_of(nn.Sequential(backbone, head), optimizer)


class Lookahead(torch.optim.Optimizer):
    """Keeps slow weights beside those of another optimizer, whose groups it shares."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.base.step(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for slow, fast in zip(self.slow, parameters, strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)


class Sam:
    """Climbs to the worst weights nearby before each step; it is no Optimizer."""

    def __init__(self, base):
        self.optimizer, self.param_groups, self.state = base, base.param_groups, base.state

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            moved = [0.01 * p.grad / p.grad.norm().clamp_min(1e-3) for p in parameters]
            for p, step in zip(parameters, moved, strict=True):
                p.add_(step).sub_(step)
        self.optimizer.step()


def wrapped(us, wrap):
    model = net()
    optimizer = wrap(torch.optim.AdamW(model.parameters(), 1e-3, fused=True))
    losses = steps_of(model, optimizer, 5, lambda: us.apply(LAST, model, optimizer=optimizer))
    assert not us.drift(LAST, model, optimizer)
    return losses


for wrap in (lambda base: base, Lookahead, Sam):

    def run(us, wrap=wrap):
        return wrapped(us, wrap)

    PROGRAMS[f"prepared_midway_with_{getattr(wrap, '__name__', '').strip('<>')}"] = run


@program
def a_run_is_resumed_in_the_other_layout(us):
    first = net()
    optimizer = torch.optim.AdamW(first.parameters(), fused=True)
    losses = steps_of(first, optimizer)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    model = net()
    again = torch.optim.AdamW(model.parameters(), fused=True)
    us.apply(LAST, model, optimizer=again)
    model.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert not us.drift(LAST, model, again)
    return losses + steps_of(model, again)


@program
def gradients_are_accumulated_and_scaled(us):
    model = us.apply(LAST, net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler, losses = torch.amp.GradScaler("cpu"), []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(6):
        loss = model(images(step)).square().mean() / 2
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad(set_to_none=step > 3)
    return losses


@program
def a_fused_optimizer_that_was_not_given_is_named(us):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    steps_of(model, optimizer, 2)
    optimizer.zero_grad()
    if us.with_us:
        with pytest.warns(KnownIssueWarning, match="AdamW.*optimizer="):
            us.apply(LAST, model)
        relayout(optimizer)
    return steps_of(model, optimizer)


@program
def one_that_is_not_fused_or_of_another_network_is_not_named(us):
    model, other = net(), net()
    held = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(other.parameters(), fused=True)]
    losses = steps_of(model, held[0], 2) + steps_of(other, held[1], 2)
    for each in held:
        each.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        us.apply(LAST, model)
    return losses + steps_of(model, held[0])


TRAININGS = [name for name in PROGRAMS if name not in BEFORE]


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_is_prepared_from_outside(name, request):
    torch.manual_seed(0)
    expected = PROGRAMS[name](Us(with_us=False))
    found = Outside(LAST).start()
    request.addfinalizer(found.stop)
    torch.manual_seed(0)
    assert PROGRAMS[name](Us(with_us=False)) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    told = re.compile(r"\w+: (\d+) of \1 convolution|never |  ")
    assert [line for line in found.lines() if not told.match(line)] == []


# ------------------------------------------------------------------ whose code runs


def named(name, base=nn.Module):
    """Return a class of the user's with the name of one of torch."""

    class Named(base):
        def forward(self, x):
            return self.inner(x).relu() if base is nn.Module else super().forward(x).relu()

    Named.__name__ = Named.__qualname__ = name
    return Named


def with_inner(name, inner):
    module = named(name)()
    module.inner = inner
    return module


NAMESAKES = {
    "Conv2d": lambda: with_inner("Conv2d", nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))),
    "Conv3d": lambda: with_inner("Conv3d", nn.Conv2d(3, 8, 3)),
    "Linear": lambda: with_inner("Linear", nn.Sequential(nn.Conv2d(3, 8, 1), nn.Flatten(2))),
    "BatchNorm2d": lambda: with_inner("BatchNorm2d", nn.Conv2d(3, 8, 3)),
    "InstanceNorm2d": lambda: with_inner("InstanceNorm2d", nn.Conv2d(3, 8, 3)),
    "GroupNorm": lambda: with_inner("GroupNorm", nn.Conv2d(3, 8, 3)),
    "ConvTranspose2d": lambda: with_inner("ConvTranspose2d", nn.ConvTranspose2d(3, 8, 3)),
    "Conv2d of Conv2d": lambda: named("Conv2d", nn.Conv2d)(3, 8, 3),
    "Conv2d of Sequential": lambda: named("Conv2d", nn.Sequential)(nn.Conv2d(3, 8, 3)),
}
for name, make in NAMESAKES.items():

    def run(us, make=make):
        batch = images()
        model = us.prepare(nn.Sequential(make()), batch, memory_format="channels_last")
        model.eval()
        low = copy.deepcopy(model)
        us.prepare(low, dtype="bfloat16")
        assert low(batch).sub(model(batch)).abs().max() < 0.1
        return steps_of(model, torch.optim.SGD(model.parameters(), 0.1))

    PROGRAMS[f"a_class_of_ones_own_named_{name}"] = run


@program
def a_model_with_lora_is_prepared_and_merged(us):
    peft = pytest.importorskip("peft")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

        def forward(self, x):
            return self.c(self.b(self.a(x).relu()).mean((2, 3)))

    config = peft.LoraConfig(r=2, target_modules=["a", "b", "c"], init_lora_weights=False)
    model = us.apply(LAST, peft.get_peft_model(Net(), config))
    assert not us.with_us or is_last(model)
    losses = steps_of(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    model.eval()
    before = model(images()).detach()
    assert model.merge_and_unload()(images()).sub(before).abs().max() < 1e-4
    return losses


@program
def networks_in_a_dictionary_get_formatted_inputs(us):
    nets = nn.ModuleDict({"g": net(), "d": nn.ModuleDict({"a": net()})}).eval()
    us.prepare(nets, "channels_last", dtype="bfloat16")
    outputs = [nets["g"](images()), copy.deepcopy(nets)["d"]["a"](images())]
    assert all(each.dtype == torch.bfloat16 for each in outputs) or not us.with_us
    if us.with_us:
        input_format.undo(nets)
        with pytest.raises(RuntimeError, match="same"):
            nets["g"](images())


# ------------------------------------------------------------------ words


def says(us, call, *words):
    """Call, and check that the warnings and the notes of the error that come hold these words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            notes = [str(error), *getattr(error, "__notes__", [])]
        else:
            notes = []
    text = " ".join([*notes, *(str(each.message) for each in caught)])
    assert all(word in text for word in words) is us.with_us


@program
def who_casts_a_prepared_network_is_told_of_the_hook(us):
    model = us.prepare(net().eval(), dtype="bfloat16").float()
    says(us, lambda: model(images()), "input_format.undo", "again")


@program
def who_encodes_is_told_where_the_hook_sits(us):
    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Conv2d(3, 4, 3)

        def encode(self, x):
            return self.encoder(x)

        def forward(self, x):
            return self.encode(x)

    says(us, lambda: us.prepare(Vae(), dtype="bfloat16"), "encode", "forward", "method=")


@program
def who_deploys_after_folding_is_told_before(us):
    class Block(nn.Sequential):
        def switch_to_deploy(self):
            return self[1].running_mean

    model = Block(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    says(us, lambda: us.apply({"fuse_conv_bn": {}}, model), "switch_to_deploy", "first")


@pytest.mark.parametrize("with_us", [True, False], ids=["with us", "without us"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_first_week_runs(name, with_us):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = PROGRAMS[name](Us(with_us=with_us))
        if with_us and losses is not None:  # within the noise of those without us
            torch.manual_seed(0)
            assert losses == pytest.approx(PROGRAMS[name](Us(with_us=False)), rel=1e-3, abs=1e-5)
