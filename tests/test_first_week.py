"""What an ordinary program does to us in its first week: each program once with us, once without.

A row is a name and a program: a function of `prepare`, a function that prepares a model or, without us, returns
it as it is. A program asserts its own right values. `with_us` tells it what more it may ask for.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from prepare.pipeline import Pipeline, shortcut

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
        return shortcut.prepare(model, *args, **options) if self.with_us else model

    def apply(self, steps, model, **options):
        return Pipeline.from_config(steps).apply(model, **options) if self.with_us else model

    def format(self, steps, batch):
        return Pipeline.from_config(steps).format(batch) if self.with_us else batch


# ------------------------------------------------------------------ an input is not an activation

BFLOAT16 = {"half": {"dtype": "bfloat16"}, "input_format": {}}
BOXES = torch.tensor([[13.3, 441.7, 1021.4, 1333.9], [1.7, 2.3, 700.1, 900.9]])


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


@dataclass
class Sample:
    image: torch.Tensor
    target: torch.Tensor
    weights: tuple


def wan():
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "ffn_dim": 32}
    sizes |= {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32}
    model = diffusers.WanTransformer3DModel(patch_size=(1, 2, 2), rope_max_seq_len=32, **sizes)
    batch = {"hidden_states": torch.randn(1, 4, 2, 8, 8), "timestep": torch.tensor([998.4])}
    return model.eval(), batch | {"encoder_hidden_states": torch.randn(1, 6, 16)}


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


def sd3():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, caption_projection_dim=16, joint_attention_dim=16,
        pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip
    batch = {"hidden_states": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([998.4])}
    batch |= {"encoder_hidden_states": torch.randn(1, 6, 16)}
    return model.eval(), batch | {"pooled_projections": torch.randn(1, 16)}


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
for each in (wan, unet, flux, sd3):

    def run(us, make=each):
        is_not_further_off_than_torchs_cast(us, make)

    PROGRAMS[f"diffusers_{each.__name__}_in_bfloat16"] = run


@pytest.mark.parametrize("with_us", [True, False], ids=["with us", "without us"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_first_week_runs(name, with_us):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PROGRAMS[name](Us(with_us=with_us))
