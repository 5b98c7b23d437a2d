"""The networks of the zoo: defaults of their libraries, with inputs that fit a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Network:
    """A function that builds the network, the rank of its convolutions, and the shape of its input.

    `more` makes the named arguments of the call, where it takes some beside the first tensor.
    """

    build: Callable[[], nn.Module]
    rank: int
    shape: tuple[int, ...]
    more: Callable[[], dict[str, Any]] = dict

    def batch(self, device: str = "cpu") -> Any:
        """Return the input of the network: a tensor, or an Example if there are named arguments."""
        torch.manual_seed(1)
        with torch.device(device):
            first, more = torch.randn(self.shape), self.more()
        if not more:
            return first
        from prepare.core.forward.example_input import Example

        return Example((first,), more)


def nnunet(rank: int, *, residual: bool, features: tuple[int, ...] = (32, 64, 128, 256)) -> Any:
    """One of nnU-Net's two networks as its planner makes them, with four stages."""

    def make() -> nn.Module:
        from dynamic_network_architectures.architectures.unet import (
            PlainConvUNet,
            ResidualEncoderUNet,
        )

        shared = {
            "input_channels": 1,
            "n_stages": 4,
            "features_per_stage": list(features),
            "conv_op": {2: nn.Conv2d, 3: nn.Conv3d}[rank],
            "kernel_sizes": 3,
            "strides": [1, 2, 2, 2],
            "num_classes": 2,
            "n_conv_per_stage_decoder": [1, 1, 1] if residual else [2, 2, 2],
            "conv_bias": True,
            "norm_op": {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[rank],
            "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "nonlin": nn.LeakyReLU,
            "nonlin_kwargs": {"inplace": True},
        }
        if residual:
            return ResidualEncoderUNet(n_blocks_per_stage=[1, 2, 2, 2], **shared)
        return PlainConvUNet(n_conv_per_stage=[2, 2, 2, 2], **shared)

    return make


def monai(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A network of MONAI."""

    def make() -> nn.Module:
        from monai.networks import nets

        return getattr(nets, name)(**options)

    return make


def transformers(name: str, kind: str = "ForImageClassification", **options: Any) -> Any:
    """A network of transformers, in its default configuration."""

    def make() -> nn.Module:
        import transformers as library

        config = getattr(library, f"{name}Config")(**options)
        return getattr(library, f"{name}{kind}")(config)

    return make


def diffusers(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A network of diffusers."""

    def make() -> nn.Module:
        import diffusers as library

        return getattr(library, name)(**options)

    return make


_SEGMENTS = {"in_channels": 1, "out_channels": 2}
_UNET = {"channels": (32, 64, 128, 256), "strides": (2, 2, 2), "num_res_units": 2, **_SEGMENTS}
_DYNUNET = {
    "kernel_size": [3] * 4,
    "strides": [1, 2, 2, 2],
    "upsample_kernel_size": [2, 2, 2],
    "filters": [32, 64, 128, 256],
    **_SEGMENTS,
}


def _noise_level() -> dict[str, Any]:
    return {"timestep": torch.tensor([10]), "return_dict": False}


def _noise_level_and_text() -> dict[str, Any]:
    return {**_noise_level(), "encoder_hidden_states": torch.randn(1, 16, 128)}


IMAGE, VOLUME = (1, 3, 224, 224), (1, 1, 48, 48, 48)
NETWORKS: dict[str, Network] = {
    "nnunet plain 2-d": Network(nnunet(2, residual=False), 2, (1, 1, 256, 256)),
    "nnunet resenc 2-d": Network(nnunet(2, residual=True), 2, (1, 1, 256, 256)),
    "nnunet plain 3-d": Network(nnunet(3, residual=False), 3, VOLUME),
    "nnunet resenc 3-d": Network(nnunet(3, residual=True), 3, VOLUME),
    "monai unet 2-d": Network(monai("UNet", spatial_dims=2, **_UNET), 2, (1, 1, 256, 256)),
    "monai unet 3-d": Network(monai("UNet", spatial_dims=3, **_UNET), 3, (1, 1, 64, 64, 64)),
    "monai dynunet 2-d": Network(monai("DynUNet", spatial_dims=2, **_DYNUNET), 2, (1, 1, 256, 256)),
    "monai dynunet 3-d": Network(monai("DynUNet", spatial_dims=3, **_DYNUNET), 3, VOLUME),
    "monai basicunet 3-d": Network(monai("BasicUNet", spatial_dims=3, **_SEGMENTS), 3, VOLUME),
    "monai segresnet 2-d": Network(
        monai("SegResNet", spatial_dims=2, init_filters=16, **_SEGMENTS), 2, (1, 1, 256, 256)
    ),
    "monai segresnet 3-d": Network(
        monai("SegResNet", spatial_dims=3, init_filters=16, **_SEGMENTS), 3, VOLUME
    ),
    "monai attentionunet 3-d": Network(
        monai("AttentionUnet", spatial_dims=3, channels=(16, 32, 64), strides=(2, 2), **_SEGMENTS),
        3,
        VOLUME,
    ),
    "monai vnet 3-d": Network(monai("VNet", spatial_dims=3, **_SEGMENTS), 3, (1, 1, 32, 32, 32)),
    "monai densenet121 2-d": Network(
        monai("DenseNet121", spatial_dims=2, in_channels=3, out_channels=10), 2, IMAGE
    ),
    "monai densenet121 3-d": Network(
        monai("DenseNet121", spatial_dims=3, **_SEGMENTS), 3, (1, 1, 64, 64, 64)
    ),
    "monai resnet18 3-d": Network(
        monai("resnet18", spatial_dims=3, n_input_channels=1, num_classes=2), 3, (1, 1, 64, 64, 64)
    ),
    "monai seresnet50 2-d": Network(
        monai("SEResNet50", spatial_dims=2, in_channels=3, num_classes=10), 2, IMAGE
    ),
    "monai efficientnet-b0 2-d": Network(
        monai("EfficientNetBN", model_name="efficientnet-b0", pretrained=False), 2, IMAGE
    ),
    "monai mednext 3-d": Network(
        monai("MedNeXt", spatial_dims=3, init_filters=16, **_SEGMENTS), 3, (1, 1, 32, 32, 32)
    ),
    "transformers resnet-50": Network(transformers("ResNet"), 2, IMAGE),
    "transformers convnext": Network(transformers("ConvNext"), 2, IMAGE),
    "transformers mobilenet-v2": Network(transformers("MobileNetV2"), 2, IMAGE),
    "transformers regnet": Network(transformers("RegNet"), 2, IMAGE),
    "transformers segformer": Network(
        transformers("Segformer", "ForSemanticSegmentation"), 2, (1, 3, 256, 256)
    ),
    "transformers poolformer": Network(transformers("PoolFormer"), 2, IMAGE),
    "transformers vit": Network(
        transformers("ViT", hidden_size=384, num_attention_heads=6, intermediate_size=1536),
        2,
        IMAGE,
    ),
    "diffusers unet2d": Network(
        diffusers("UNet2DModel", sample_size=64, block_out_channels=(64, 128, 128, 256)),
        2,
        (1, 3, 64, 64),
        _noise_level,
    ),
    "diffusers unet2d condition": Network(
        diffusers(
            "UNet2DConditionModel",
            sample_size=32,
            block_out_channels=(64, 128, 256),
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=128,
        ),
        2,
        (1, 4, 32, 32),
        _noise_level_and_text,
    ),
    "diffusers autoencoder": Network(
        diffusers(
            "AutoencoderKL",
            block_out_channels=(32, 64, 128),
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
        ),
        2,
        (1, 3, 128, 128),
        lambda: {"return_dict": False},
    ),
}
