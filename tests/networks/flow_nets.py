"""Networks with channels-last weights, on which the predicted and the observed flow are compared."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format, convert_conv3d_weight_memory_format

from prepare.core.forward.example_input import Example, build_example
from small_nets import build, config_of, model_configs


def channels_last(tensor: Any) -> Any:
    """Return a tensor of 4 or 5 dimensions in channels-last with canonical strides; others unchanged."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if isinstance(tensor, torch.Tensor) and tensor.dim() in formats:
        return tensor.to(memory_format=formats[tensor.dim()])
    return tensor


def converted(model: nn.Module) -> nn.Module:
    """Convert the convolution weights of a model to channels-last with torch's converters."""
    convert_conv2d_weight_memory_format(model, torch.channels_last)
    convert_conv3d_weight_memory_format(model, torch.channels_last_3d)
    return model


def network(name: str) -> nn.Module:
    """Build a network of `conf/model`, or one of MORE."""
    return converted(MORE[name][0]().eval() if name in MORE else build(name))


def example_of(name: str) -> Example:
    """Build the example input of a network, in channels-last."""
    if name in MORE:
        return Example(tuple(channels_last(torch.randn(shape)) for shape in MORE[name][1:]))
    example = build_example(OmegaConf.to_container(config_of(name).input))
    kwargs = {key: channels_last(value) for key, value in example.kwargs.items()}
    return Example(tuple(map(channels_last, example.args)), kwargs)


def _monai(name: str, **options: Any) -> Any:
    def make() -> nn.Module:
        from monai.networks import nets

        return getattr(nets, name)(**options)

    return make


def _transformers(name: str, **options: Any) -> Any:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, f"{name}Model")(
            getattr(transformers, f"{name}Config")(**options)
        )

    return make


def _kornia(module: str, name: str) -> Any:
    def make() -> nn.Module:
        from importlib import import_module

        return getattr(import_module(f"kornia.{module}"), name)(pretrained=False)

    return make


_TWO = {"in_channels": 1, "out_channels": 2}
# The function that builds each network, and the shapes of its inputs.
MORE: dict[str, tuple] = {
    "monai_basicunet3d": (
        _monai("BasicUNet", spatial_dims=3, features=(8, 8, 16, 32, 32, 8), **_TWO),
        (2, 1, 32, 32, 32),
    ),
    "monai_vnet": (_monai("VNet", spatial_dims=3, **_TWO), (2, 1, 32, 32, 32)),
    "monai_mednext": (
        _monai("MedNeXt", spatial_dims=3, init_filters=8, **_TWO),
        (2, 1, 32, 32, 32),
    ),
    "transformers_swin": (
        _transformers("Swin", image_size=64, embed_dim=16, depths=[1, 1], num_heads=[2, 4],
                      window_size=4),
        (2, 3, 64, 64),
    ),
    "transformers_regnet": (
        _transformers("RegNet", embedding_size=8, hidden_sizes=[8, 16, 32, 64],
                      depths=[1, 1, 1, 1], groups_width=8),
        (2, 3, 64, 64),
    ),
    "kornia_hardnet": (_kornia("feature", "HardNet"), (2, 1, 32, 32)),
    "kornia_dexined": (_kornia("filters.dexined", "DexiNed"), (2, 3, 64, 64)),
}  # fmt: skip
NETS = [*model_configs(), *MORE]
# Networks whose predicted and observed flows differ: the parts that differ, or the status.
KNOWN_DIFFERENCES = {
    # torch's fake interpolate of one channel returns other strides, and cat follows them.
    "kornia_dexined": ("events", "copies", "convolutions"),
    # Its positions repeat as often as a tensor of sizes says.
    "transformers_qwen3_vl": ("cannot predict",),
}
