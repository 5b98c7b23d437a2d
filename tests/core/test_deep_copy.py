"""Test copies of models: modes, hooks, shared memory, computed weights, and networks of libraries."""

import copy
from functools import partial

import pytest
import torch
from einops.layers import torch as einops
from torch import nn

from prepare.core.model.module_tree import CopyError, deep_copy
from prepare.core.model.training_mode import may_read_mode
from prepare.stages.verify import verify
from small_nets import same


def monai(name, **options):
    return lambda: getattr(pytest.importorskip("monai.networks.nets"), name)(**options)


def kornia(name):
    return lambda: getattr(pytest.importorskip("kornia.feature"), name)(pretrained=False)


def transformers(name, kind="Model", **options):
    def make():
        library = pytest.importorskip("transformers")
        return getattr(library, f"{name}{kind}")(getattr(library, f"{name}Config")(**options))

    return make


def diffusers(name, **options):
    return lambda: getattr(pytest.importorskip("diffusers"), name)(**options)


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(1e-6 * torch.ones(4))

    def forward(self, x):
        return x * self.gamma


class TimmBlock(nn.Module):
    """Has what timm's blocks have: partial classes, a tied bias, a buffer outside the state dict, a plain list."""

    def __init__(self):
        super().__init__()
        self.norm_layer = partial(nn.LayerNorm, eps=1e-6)
        self.norm, self.scale = self.norm_layer(4), LayerScale()
        self.qkv, self.proj = nn.Linear(4, 12), nn.Linear(4, 4)
        self.proj.bias = self.norm.bias
        self.register_buffer("index", torch.arange(9).view(3, 3), persistent=False)
        self.grids = [torch.zeros(2), self.index]
        self.drop_path = DropPath(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.drop_path(self.scale(self.proj(mixed)))


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return x * x.new_empty(len(x), 1, 1).bernoulli_(1 - self.drop_prob) if self.training else x


FLAT = {"spatial_dims": 2, "in_channels": 1}
UNET = {"channels": (8, 16), "attention_levels": (False, True), "num_res_blocks": 1, "norm_num_groups": 4}  # fmt: skip
BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
TINY = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}  # fmt: skip
LIBRARIES = {
    "einops": lambda: nn.Sequential(
        einops.Rearrange("b c h w -> b (h w) c"),
        einops.EinMix("b n c -> b n d", weight_shape="c d", bias_shape="d", c=3, d=4),
        einops.Reduce("b n d -> b d", "mean"),
    ),
    "blocks as timm's": lambda: nn.Sequential(TimmBlock(), TimmBlock()),
    "monai ViTAutoEnc": monai("ViTAutoEnc", img_size=(16, 16), patch_size=(4, 4), hidden_size=24, mlp_dim=24,
                              num_heads=2, num_layers=1, **FLAT),
    "monai DiffusionModelUNet": monai("DiffusionModelUNet", out_channels=1, num_head_channels=4, **FLAT, **UNET),
    "monai UNet": monai("UNet", out_channels=2, channels=(4, 8), strides=(2,), **FLAT),
    "kornia KeyNet": kornia("KeyNet"),
    "kornia HardNet": kornia("HardNet"),
    "transformers ViT": transformers("ViT", image_size=32, patch_size=8, **TINY),
    "transformers Wav2Vec2": transformers("Wav2Vec2", conv_dim=[8], conv_kernel=[3], conv_stride=[2],
                                          num_feat_extract_layers=1, **TINY),
    "diffusers UNet2DModel": diffusers("UNet2DModel", down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                                       up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4, **BLOCKS),
    "diffusers AutoencoderKL": diffusers("AutoencoderKL", down_block_types=("DownEncoderBlock2D",) * 2,
                                         up_block_types=("UpDecoderBlock2D",) * 2, **BLOCKS),
}  # fmt: skip


def described(model):
    return {
        name: (type(m), m.training, len(m._forward_hooks), sorted(vars(m)))
        for name, m in model.named_modules()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_copy_of_a_library_network_keeps_all_but_identity(name):
    model = LIBRARIES[name]()
    for index, module in enumerate(model.modules()):
        module.training = index % 3 == 0
        module.register_forward_hook(print)
        module.note = index
    duplicate = deep_copy(model)
    assert described(duplicate) == described(model)
    same(duplicate, model)
    assert not {id(t) for t in duplicate.parameters()} & {id(t) for t in model.parameters()}


def test_ties_and_listed_tensors_of_a_block_are_those_of_the_copy():
    model = TimmBlock()
    duplicate = deep_copy(model)
    assert duplicate.proj.bias is duplicate.norm.bias
    assert duplicate.grids[1] is duplicate.index
    assert duplicate.grids[0] is not model.grids[0]
    assert duplicate._non_persistent_buffers_set == {"index"}


def test_gradient_hooks_and_attributes_of_parameters_are_copied():
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: gradient * 2)
    model.weight.lr_scale = 0.1
    duplicate = deep_copy(model)
    for each in (model, duplicate):
        each(torch.ones(1, 2)).sum().backward()
    assert torch.equal(duplicate.weight.grad, model.weight.grad)
    assert duplicate.weight.lr_scale == 0.1


def test_memory_that_a_parameter_shares_is_shared_in_the_copy():
    model = nn.Conv2d(2, 2, 1)
    model.flat = model.weight.data.view(-1)
    duplicate = deep_copy(model)
    duplicate.flat.fill_(7.0)
    assert duplicate.weight.eq(7.0).all()
    assert not model.weight.eq(7.0).any()


def test_a_generator_is_copied_with_its_state():
    model = nn.Identity()
    model.generator = torch.Generator().manual_seed(3)
    torch.rand(2, generator=model.generator)
    drawn = [torch.rand(1, generator=m.generator) for m in (deep_copy(model), model)]
    assert drawn[0] == drawn[1]


def test_a_buffer_made_by_the_first_forward_is_copied():
    model = einops.Rearrange("a b -> b a")
    model.register_buffer("mask", torch.ones(2), persistent=False)
    duplicate = deep_copy(model)
    assert duplicate.mask is not model.mask
    assert duplicate._non_persistent_buffers_set == {"mask"}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_of_the_old_weight_norm_is_copied():
    model = nn.utils.weight_norm(nn.Conv2d(2, 2, 1))
    model(torch.ones(1, 2, 3, 3))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    duplicate = deep_copy(model)
    batch = torch.ones(1, 2, 3, 3)
    assert torch.equal(duplicate(batch), model(batch))
    assert duplicate.weight_v is not model.weight_v


@pytest.mark.parametrize("place", ["attribute", "hook", "default"])
def test_a_function_that_refers_to_the_model_is_not_copied(place):
    model = nn.Sequential(nn.Linear(2, 2))
    inner = model[0]
    if place == "attribute":
        model.scaled = lambda x: x * inner.weight.sum()
    elif place == "hook":
        model.register_forward_hook(lambda *_: inner.bias)
    else:
        model.scaled = lambda x, weight=inner.weight: x * weight
    with pytest.raises(CopyError, match="a function that refers to the model itself"):
        deep_copy(model)


def test_a_part_that_python_cannot_copy_is_named():
    model = nn.Identity()
    model.stream = (number for number in range(3))
    with pytest.raises(CopyError, match="generator"):
        deep_copy(model)


# --------------------------------------------------------------------------- modes that do not matter


class Looks(nn.Module):
    """Reads the mode of its child."""

    def __init__(self):
        super().__init__()
        self.child = nn.Identity()

    def forward(self, x):
        return x * 2 if self.child.training else x


def test_only_a_mode_that_code_reads_can_fail_the_flags():
    model = nn.Sequential(einops.Rearrange("b c h w -> b h w c"), nn.Dropout(), Looks())
    modules = dict(model.named_modules())
    found = {name for name in modules if may_read_mode(modules, name)}
    assert found == {"1", "2", "2.child"}


def test_a_deepcopy_of_einops_layers_passes_and_a_dropout_does_not():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), einops.Rearrange("b c h w -> b h w c"), nn.Dropout())
    reference = copy.deepcopy(model.eval())
    assert reference[1].training
    batch = torch.randn(1, 3, 4, 4)
    assert verify(reference, model, batch).status == "pass"
    model[2].train()
    result = verify(reference, model, batch)
    assert (result.status, result.culprit) == ("fail", "2")
    assert "the same mode" in result.advice
    assert "steps." not in result.advice


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_modules_may_read_their_mode():
    model = nn.Sequential(torch.jit.script(nn.ReLU()))
    reference = nn.Sequential(torch.jit.script(nn.ReLU()))
    reference[0].eval()
    result = verify(reference, model, torch.randn(1, 3))
    assert "flags" in {check.what for check in result.checks if check.status == "fail"}
