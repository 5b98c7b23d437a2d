"""Video autoencoders of diffusers, in small configurations with random weights.

The batch is 2: with one sample torch runs 3-d convolutions of such small activations in its reference kernel,
which it does not for those of real videos.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zoo_networks import Network, diffusers

_WAN = {
    "base_dim": 8,
    "z_dim": 4,
    "num_res_blocks": 1,
    "attn_scales": [],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
    "scale_factor_spatial": 4,
    "dim_mult": [1, 2, 2],
}
_FRAMES = (2, 3, 5, 32, 32)


def _sampled() -> dict[str, bool]:
    return {"return_dict": False}


@dataclass(frozen=True)
class VideoNetwork(Network):
    """A network of diffusers that can be built with other options."""

    name: str = ""
    options: dict[str, object] = field(default_factory=dict)

    def with_options(self, **options: object) -> VideoNetwork:
        """Return the network with these options changed."""
        return _video(self.name, self.shape, **(self.options | options))


def _video(name: str, shape: tuple[int, ...] = _FRAMES, **options: object) -> VideoNetwork:
    build = diffusers(name, **options)
    return VideoNetwork(build, 3, shape, _sampled, name=name, options=options)


VIDEO_NETWORKS: dict[str, VideoNetwork] = {
    "diffusers wan 2.1": _video(
        "AutoencoderKLWan", **_WAN, temperal_downsample=[False, True], scale_factor_temporal=2
    ),
    "diffusers wan 2.2": _video(
        "AutoencoderKLWan",
        **(_WAN | {"decoder_base_dim": 8, "is_residual": True, "patch_size": 2}),
        temperal_downsample=[False, True],
        scale_factor_temporal=2,
        in_channels=12,
        out_channels=12,
    ),
    "diffusers hunyuan video": _video(
        "AutoencoderKLHunyuanVideo",
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    ),
    "diffusers ltx video": _video(
        "AutoencoderKLLTXVideo",
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    ),
    "diffusers cosmos": _video(
        "AutoencoderKLCosmos",
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
    ),
    "diffusers cogvideox": _video(
        "AutoencoderKLCogVideoX",
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
    ),
    "diffusers mochi": _video(
        "AutoencoderKLMochi",
        (2, 3, 6, 32, 32),
        latent_channels=4,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    ),
    "diffusers easyanimate": _video(
        "AutoencoderKLMagvit",
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    ),
}

_REAL, _LONGER = (1, 3, 5, 256, 256), (1, 3, 9, 256, 256)
_WIDE_WAN = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
# The same autoencoders as their library configures them, without weights.
REAL_NETWORKS: dict[str, VideoNetwork] = {
    "diffusers wan 2.1": _video("AutoencoderKLWan", _REAL),
    "diffusers wan 2.2": _video("AutoencoderKLWan", _REAL, **_WIDE_WAN),
    "diffusers hunyuan video": _video("AutoencoderKLHunyuanVideo", _REAL),
    "diffusers ltx video": _video("AutoencoderKLLTXVideo", _LONGER),
    "diffusers cosmos": _video("AutoencoderKLCosmos", _LONGER),
    "diffusers cogvideox": _video("AutoencoderKLCogVideoX", _LONGER),
    "diffusers mochi": _video("AutoencoderKLMochi", (1, 3, 6, 256, 256)),
    "diffusers easyanimate": _video("AutoencoderKLMagvit", _REAL),
}
