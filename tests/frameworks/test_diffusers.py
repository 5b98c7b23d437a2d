"""The switch for pipelines of diffusers: the component, the method that is called, and the hooks of offloading."""

import copy

import pytest
import torch
from torch import nn

from prepare.errors import ConfigError, RefusedError
from prepare.frameworks.diffusers import prepare
from prepare.pipeline import Pipeline

RECIPE = {"device": {"device": "cpu"}, "half": {"dtype": "bf16"}, "conv2d_memory_format": {}}


class Autoencoder(nn.Module):
    """Decodes as those of diffusers do: the method moves the weights by the hook of accelerate."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Conv2d(3, 4, 3)

    def decode(self, latents, *, scale=1.0):
        self._hf_hook.pre_forward(self)
        self.seen = latents
        return self.decoder(latents * scale)


class Moves:
    """A hook that moves a whole model, as enable_model_cpu_offload installs it."""

    def __init__(self):
        self.calls = 0

    def pre_forward(self, module):
        self.calls += 1


class Pipe:
    """Holds components as a pipeline does, networks and others."""

    def __init__(self):
        self.vae = Autoencoder()
        self.vae._hf_hook = Moves()
        self.components = {"vae": self.vae, "scheduler": object(), "unet": nn.Conv2d(3, 3, 3)}


LATENTS = torch.randn(1, 3, 5, 5)


def test_the_method_of_a_component_gets_formatted_tensors():
    pipe = Pipe()
    unet = copy.deepcopy(pipe.components["unet"].weight)
    assert prepare(pipe, "vae", recipe=RECIPE, method="decode") is pipe
    assert pipe.vae.decoder.weight.stride() == (27, 1, 9, 3)
    assert torch.equal(pipe.components["unet"].weight, unet)
    for vae in (pipe.vae, copy.deepcopy(pipe.vae)):
        out = vae.decode(LATENTS, scale=2.0)
        assert vae.seen.dtype is torch.bfloat16
        assert vae.seen.is_contiguous(memory_format=torch.channels_last)
        expected = vae.decoder(2 * LATENTS.bfloat16())
        assert torch.equal(out, expected)
        assert vae._hf_hook.calls == 1  # the hook of offloading is asked as before
    assert pipe.vae.seen is not LATENTS


def test_what_another_has_put_in_place_of_the_method_is_called():
    pipe, seen = Pipe(), []
    pipe.vae.decode = seen.append
    for _ in range(2):
        prepare(pipe, "vae", recipe=Pipeline.from_config(RECIPE), method="decode")
    pipe.vae.decode(LATENTS)
    assert [each.dtype for each in seen] == [torch.bfloat16]


def test_weights_that_are_offloaded_one_by_one_are_refused():
    pipe = Pipe()
    pipe.vae.to("meta")  # as accelerate leaves them between calls
    with pytest.raises(RefusedError, match="vae: its weights are offloaded .* prepare it first"):
        prepare(pipe, "vae", recipe=RECIPE)
    assert pipe.vae.decoder.weight.dtype is torch.float32


def test_a_wrong_component_or_method_is_named_with_those_there_are():
    with pytest.raises(RefusedError, match="'vea' is not a network .* did you mean 'vae'"):
        prepare(Pipe(), "vea", recipe=RECIPE)
    with pytest.raises(ConfigError, match="no method 'decod'; did you mean 'decode'"):
        prepare(Pipe(), "vae", recipe=RECIPE, method="decod")


@pytest.mark.slow  # importing a pipeline takes 5 to 40 seconds
@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_of_diffusers_paints_the_same_picture():
    diffusers = pytest.importorskip("diffusers")
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=[32, 32], latent_channels=4, norm_num_groups=8,
        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)  # fmt: skip
    transformer = diffusers.DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4,
        out_channels=8, num_layers=1, sample_size=8, norm_num_groups=2)  # fmt: skip
    pipe = diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler())

    def picture():
        generator = torch.manual_seed(0)
        return torch.tensor(
            pipe([1], num_inference_steps=2, generator=generator, output_type="np").images
        )

    before = picture()
    prepare(pipe, "vae", recipe={"conv2d_memory_format": {}, "repair_layout": {}}, method="decode")
    assert vae.decoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(picture(), before, atol=1e-4)
    _, hook = accelerate.cpu_offload_with_hook(vae, "cpu")
    prepare(pipe, "vae", recipe={"half": {"dtype": "bfloat16"}}, method="decode")
    assert vae._hf_hook is hook.hook
    assert torch.allclose(picture(), before, atol=0.1)
    accelerate.cpu_offload(vae, "cpu")
    with pytest.raises(RefusedError, match="offloaded module by module"):
        prepare(pipe, "vae", recipe=RECIPE)
