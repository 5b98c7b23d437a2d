"""Networks of the census beside timm's and the zoo's: defaults of their libraries, with random weights."""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from zoo_networks import Network, diffusers, monai


@contextmanager
def stand_in_for_torchvision() -> Iterator[None]:
    """Let `import torchvision` succeed, where it is missing, with modules of empty classes."""
    if importlib.util.find_spec("torchvision"):
        yield
        return

    class StandIn(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    words = "nearest bilinear bicubic box hamming lanczos"
    modes = {word.upper(): word for word in words.split()} | {"NEAREST_EXACT": "nearest-exact"}
    names = ("", ".transforms", ".transforms.functional", ".datasets", ".datasets.utils")
    names += (".ops", ".ops.misc", ".models", ".models.feature_extraction")
    names += (".models.resnet", ".models.vgg", ".models.densenet")
    for name in names:
        module: Any = StandIn(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__path__ = []
        module.__version__ = "0"
        module.InterpolationMode = enum.Enum("InterpolationMode", modes)
        sys.modules[module.__name__] = module
        parent, _, last = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    yield
    # Other libraries ask whether it is there.
    for name in names:
        del sys.modules[f"torchvision{name}"]


def segmentation(name: str, encoder: str = "tu-resnet18") -> Callable[[], nn.Module]:
    """A network of segmentation-models-pytorch."""

    def make() -> nn.Module:
        with stand_in_for_torchvision():
            import segmentation_models_pytorch as library

        return getattr(library, name)(encoder_name=encoder, encoder_weights=None, classes=2)

    return make


def kornia(path: str, **options: Any) -> Callable[[], nn.Module]:
    """A network of kornia, by its dotted path below the package."""

    def make() -> nn.Module:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"kornia.{module}"), name)(**options)

    return make


def _dynamic(name: str) -> Callable[[], dict[str, Any]]:
    return lambda: {
        name: torch.randn(1, 16, 128),
        "timestep": torch.tensor([10]),
        "return_dict": False,
    }


def _step(name: str = "timesteps") -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.tensor([10, 10])}


def _plain() -> dict[str, Any]:
    return {"return_dict": False}


IMAGE, GRAY, VOLUME, SCAN = (
    (2, 3, 224, 224),
    (2, 1, 128, 128),
    (2, 1, 32, 32, 32),
    (2, 1, 64, 64, 64),
)
_SEGMENTS = {"in_channels": 1, "out_channels": 2}
_CHANNELS = {"channels": (16, 32, 64), "strides": (2, 2)}
_ALL_STRIDES = {"channels": (16, 32, 64), "strides": (2, 2, 2)}


def _monai() -> dict[str, Network]:
    """Those of MONAI in 2-d and 3-d."""
    found = {}
    for rank, size, deep in ((2, GRAY, GRAY), (3, VOLUME, SCAN)):
        sides, dims = size[2:], {"spatial_dims": rank}
        kinds: dict[str, tuple[Any, tuple[int, ...]]] = {
            "attentionunet": (monai("AttentionUnet", **dims, **_SEGMENTS, **_CHANNELS), size),
            "autoencoder": (
                monai("AutoEncoder", **dims, **_SEGMENTS, **_ALL_STRIDES, num_res_units=2),
                size,
            ),
            "autoencoderkl": (
                monai(
                    "AutoencoderKL",
                    **dims,
                    in_channels=1,
                    out_channels=1,
                    channels=(32, 64, 64),
                    attention_levels=(False, False, True),
                    num_res_blocks=1,
                    norm_num_groups=16,
                ),
                size,
            ),
            "basicunet": (monai("BasicUNet", **dims, **_SEGMENTS), size),
            "basicunetplusplus": (monai("BasicUNetPlusPlus", **dims, **_SEGMENTS), size),
            "dynunet residual": (
                monai(
                    "DynUNet",
                    **dims,
                    **_SEGMENTS,
                    kernel_size=[3] * 3,
                    strides=[1, 2, 2],
                    upsample_kernel_size=[2, 2],
                    filters=[16, 32, 64],
                    res_block=True,
                    deep_supervision=True,
                    deep_supr_num=1,
                ),
                size,
            ),
            "efficientnet-b0": (
                monai(
                    "EfficientNetBN",
                    model_name="efficientnet-b0",
                    pretrained=False,
                    **dims,
                    in_channels=1,
                ),
                deep,
            ),
            "flexibleunet": (
                monai(
                    "FlexibleUNet",
                    **_SEGMENTS,
                    backbone="efficientnet-b0",
                    **dims,
                    pretrained=False,
                ),
                deep,
            ),
            "highresnet": (monai("HighResNet", **dims, **_SEGMENTS), size),
            "mednext small": (monai("MedNeXt", **dims, **_SEGMENTS), size),
            "regunet": (
                monai(
                    "RegUNet",
                    **dims,
                    in_channels=1,
                    num_channel_initial=8,
                    depth=2,
                    out_channels=rank,
                ),
                size,
            ),
            "resnet50": (monai("resnet50", **dims, n_input_channels=1, num_classes=2), deep),
            "segresnetds": (monai("SegResNetDS", **dims, init_filters=16, **_SEGMENTS), size),
            "segresnetvae": (
                monai("SegResNetVAE", **dims, input_image_size=sides, init_filters=8, **_SEGMENTS),
                size,
            ),
            "swinunetr": (monai("SwinUNETR", **dims, **_SEGMENTS, feature_size=12), deep),
            "unetr": (monai("UNETR", **dims, **_SEGMENTS, img_size=sides, feature_size=8), size),
            "varautoencoder": (
                monai(
                    "VarAutoEncoder",
                    **dims,
                    in_shape=(1, *sides),
                    out_channels=1,
                    latent_size=16,
                    **_ALL_STRIDES,
                ),
                size,
            ),
            "vitautoenc": (
                monai("ViTAutoEnc", **dims, in_channels=1, img_size=sides, patch_size=16),
                size,
            ),
            "vqvae": (
                monai(
                    "VQVAE",
                    **dims,
                    in_channels=1,
                    out_channels=1,
                    channels=(32, 64),
                    num_res_channels=(32, 64),
                    num_res_layers=1,
                    downsample_parameters=((2, 4, 1, 1),) * 2,
                    upsample_parameters=((2, 4, 1, 1, 0),) * 2,
                    num_embeddings=16,
                    embedding_dim=8,
                ),
                size,
            ),
            "senet154": (monai("SENet154", **dims, in_channels=1, num_classes=2), deep),
            "seresnext50": (monai("SEResNext50", **dims, in_channels=1, num_classes=2), deep),
            "densenet169": (monai("DenseNet169", **dims, **_SEGMENTS), deep),
            "patchdiscriminator": (
                monai("PatchDiscriminator", **dims, in_channels=1, channels=16, num_layers_d=3),
                size,
            ),
            "voxelmorphunet": (
                monai(
                    "VoxelMorphUNet",
                    **dims,
                    in_channels=2,
                    unet_out_channels=16,
                    channels=(8, 8, 16, 16, 16, 16),
                    final_conv_channels=(8, 8),
                ),
                (2, 2, *sides),
            ),
        }
        found |= {
            f"monai {name} {rank}-d": Network(make, rank, shape)
            for name, (make, shape) in kinds.items()
        }
        unet = {
            "in_channels": 1,
            "out_channels": 1,
            "channels": (32, 64, 64),
            "num_res_blocks": 1,
            "attention_levels": (False, False, True),
            "num_head_channels": 16,
            "norm_num_groups": 16,
        }
        found[f"monai diffusionunet {rank}-d"] = Network(
            monai("DiffusionModelUNet", **dims, **unet), rank, size, _step()
        )
    return found | {
        "monai ahnet 3-d": Network(
            monai("AHNet", spatial_dims=3, in_channels=1, out_channels=2), 3, (1, 1, 128, 128, 32)
        ),
        "monai hovernet 2-d": Network(
            monai("HoVerNet", in_channels=3, out_classes=5), 2, (1, 3, 256, 256)
        ),
        "monai vista3d 3-d": Network(monai("vista3d132", encoder_embed_dim=16), 3, SCAN),
        "monai vnet 2-d": Network(monai("VNet", spatial_dims=2, **_SEGMENTS), 2, GRAY),
    }


_CLASSES = """
    BeitModel BitForImageClassification CLIPVisionModel ConvNextV2ForImageClassification
    CvtForImageClassification Dinov2ForImageClassification DINOv3ConvNextModel DPTForDepthEstimation
    EfficientNetForImageClassification FocalNetForImageClassification GLPNForDepthEstimation
    HGNetV2ForImageClassification HieraForImageClassification LevitForImageClassification
    MobileNetV1ForImageClassification MobileViTForImageClassification
    MobileViTForSemanticSegmentation MobileViTV2ForImageClassification PvtForImageClassification
    PvtV2ForImageClassification SegformerForImageClassification SiglipVisionModel
    SwiftFormerForImageClassification SwinForImageClassification Swin2SRForImageSuperResolution
    Swinv2ForImageClassification TextNetForImageClassification UperNetForSemanticSegmentation
    VitDetModel RTDetrForObjectDetection YolosForObjectDetection SamModel
    DepthAnythingForDepthEstimation ZoeDepthForDepthEstimation PPLCNetForImageClassification
    Sam2VisionModel Data2VecVisionForSemanticSegmentation VideoMAEForVideoClassification
    TimesformerForVideoClassification VivitForVideoClassification MgpstrForSceneTextRecognition
    RegNetForImageClassification
"""


def _default(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers as library

        model = getattr(library, name)
        return model(model.config_class())

    return make


def _transformers() -> dict[str, Network]:
    """Vision models of transformers in their default configurations."""
    shapes = {
        "Swin2SRForImageSuperResolution": (1, 3, 64, 64),
        "VideoMAEForVideoClassification": (1, 16, 3, 224, 224),
        "TimesformerForVideoClassification": (1, 8, 3, 224, 224),
        "VivitForVideoClassification": (1, 32, 3, 224, 224),
        "MgpstrForSceneTextRecognition": (2, 3, 32, 128),
        "SamModel": (1, 3, 1024, 1024),
        "Sam2VisionModel": (1, 3, 1024, 1024),
        "YolosForObjectDetection": (1, 3, 512, 864),
        "DPTForDepthEstimation": (1, 3, 384, 384),
    }  # fmt: skip
    return {
        f"transformers {name}": Network(_default(name), 2, shapes.get(name, IMAGE))
        for name in _CLASSES.split()
    }


def _diffusers() -> dict[str, Network]:
    """Autoencoders and UNets of diffusers."""
    kl = {
        "block_out_channels": (32, 64),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    cross = {
        "block_out_channels": (64, 128),
        "cross_attention_dim": 128,
        "attention_head_dim": 8,
    }
    picture, latent = (1, 3, 128, 128), (1, 4, 32, 32)
    return {
        "diffusers asymmetric autoencoder": Network(
            diffusers("AsymmetricAutoencoderKL", **{k: v for k, v in kl.items() if k != "block_out_channels"},
                      down_block_out_channels=(32, 64), up_block_out_channels=(32, 64)),
            2, picture, _plain,
        ),
        "diffusers autoencoder dc": Network(
            diffusers("AutoencoderDC", attention_head_dim=8, encoder_block_out_channels=(32, 64, 64),
                      decoder_block_out_channels=(32, 64, 64), latent_channels=8,
                      encoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
                      decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
                      encoder_layers_per_block=(1, 1, 1), decoder_layers_per_block=(1, 1, 1),
                      encoder_qkv_multiscales=((), (), (5,)), decoder_qkv_multiscales=((), (), (5,))),
            2, picture, _plain,
        ),
        "diffusers autoencoder tiny": Network(diffusers("AutoencoderTiny"), 2, picture, _plain),
        "diffusers vq": Network(diffusers("VQModel", **kl, latent_channels=4), 2, picture, _plain),
        "diffusers autoencoder flux2": Network(diffusers("AutoencoderKLFlux2"), 2, picture, _plain),
        "diffusers hunyuan image": Network(
            diffusers("AutoencoderKLHunyuanImage", in_channels=3, out_channels=3, latent_channels=16,
                      block_out_channels=(32, 64, 64), layers_per_block=1, spatial_compression_ratio=4,
                      sample_size=128),
            2, picture, _plain,
        ),
        "diffusers temporal decoder": Network(
            diffusers("AutoencoderKLTemporalDecoder", block_out_channels=(32, 64),
                      down_block_types=("DownEncoderBlock2D",) * 2),
            3, (2, 3, 64, 64), lambda: {"num_frames": 2, "return_dict": False},
        ),
        "diffusers qwen image": Network(
            diffusers("AutoencoderKLQwenImage", base_dim=16, z_dim=4, dim_mult=[1, 2], num_res_blocks=1,
                      temperal_downsample=[False], latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
            3, (1, 3, 1, 64, 64), _plain,
        ),
        "diffusers ltx2 video": Network(diffusers("AutoencoderKLLTX2Video"), 3, (1, 3, 9, 128, 128), _plain),
        "diffusers hunyuan video 1.5": Network(
            diffusers("AutoencoderKLHunyuanVideo15"), 3, (1, 3, 5, 64, 64), _plain
        ),
        "diffusers kvae": Network(diffusers("AutoencoderKLKVAE"), 2, picture, _plain),
        "diffusers kvae video": Network(diffusers("AutoencoderKLKVAEVideo"), 3, (1, 3, 5, 64, 64), _plain),
        "diffusers unet3d condition": Network(
            diffusers("UNet3DConditionModel", **cross, norm_num_groups=32,
                      down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
                      up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
            2, (1, 4, 4, 16, 16), _dynamic("encoder_hidden_states"),
        ),
        "diffusers unet motion": Network(
            diffusers("UNetMotionModel", block_out_channels=(64, 128), cross_attention_dim=128,
                      num_attention_heads=8, motion_num_attention_heads=8,
                      down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
                      up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion")),
            2, (1, 4, 4, 16, 16),
            lambda: _dynamic("encoder_hidden_states")()
            | {"encoder_hidden_states": torch.randn(4, 16, 128)},
        ),
        "diffusers unet spatio-temporal": Network(
            diffusers("UNetSpatioTemporalConditionModel", block_out_channels=(64, 128),
                      cross_attention_dim=128, num_attention_heads=(4, 8),
                      projection_class_embeddings_input_dim=96, addition_time_embed_dim=32,
                      down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
                      up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")),
            3, (1, 4, 8, 16, 16),
            lambda: _dynamic("encoder_hidden_states")() | {"added_time_ids": torch.randn(1, 3)},
        ),
        "diffusers unet2d condition default": Network(
            diffusers("UNet2DConditionModel", cross_attention_dim=128), 2, latent,
            _dynamic("encoder_hidden_states"),
        ),
        "diffusers controlnet": Network(
            diffusers("ControlNetModel", cross_attention_dim=128), 2, latent,
            lambda: _dynamic("encoder_hidden_states")() | {"controlnet_cond": torch.randn(1, 3, 256, 256)},
        ),
    }  # fmt: skip


def _kornia() -> dict[str, Network]:
    return {
        "kornia dexined": Network(kornia("models.dexined.DexiNed", pretrained=False), 2, (1, 3, 128, 128)),
        "kornia rrdbnet": Network(
            kornia("models.rrdbnet.RRDBNet", num_in_ch=3, num_out_ch=3, num_block=4), 2, (1, 3, 64, 64)
        ),
        "kornia efficientvit": Network(
            kornia("models.efficient_vit.backbone.efficientvit_backbone_b1"), 2, IMAGE
        ),
        "kornia hardnet": Network(kornia("feature.hardnet.HardNet", pretrained=False), 2, (8, 1, 32, 32)),
        "kornia hynet": Network(kornia("feature.hynet.HyNet", pretrained=False), 2, (8, 1, 32, 32)),
        "kornia sosnet": Network(kornia("feature.sosnet.SOSNet", pretrained=False), 2, (8, 1, 32, 32)),
        "kornia tfeat": Network(kornia("feature.tfeat.TFeat", pretrained=False), 2, (8, 1, 32, 32)),
        "kornia tiny vit": Network(kornia("models.tiny_vit.TinyViT"), 2, IMAGE),
        "kornia xfeat": Network(kornia("feature.xfeat.XFeatModel"), 2, (1, 3, 128, 128)),
        "kornia disk": Network(kornia("feature.disk._unets.unet.Unet", in_features=3,
                                      down=[16, 32, 64, 64, 64], up=[64, 64, 64, 129]), 2, (1, 3, 128, 128)),
        "kornia defmo": Network(kornia("feature.defmo.DeFMO", pretrained=False), 2, (1, 6, 128, 128)),
        "kornia yunet": Network(
            kornia("models.yunet.YuNet", phase="test", pretrained=False), 2, (1, 3, 320, 320)
        ),
    }  # fmt: skip


def _segmentation() -> dict[str, Network]:
    names = [
        "Unet",
        "UnetPlusPlus",
        "MAnet",
        "Linknet",
        "FPN",
        "PSPNet",
        "DeepLabV3",
        "DeepLabV3Plus",
        "PAN",
        "UPerNet",
        "Segformer",
    ]
    encoders = [
        "mit_b0",
        "efficientnet-b0",
        "mobileone_s0",
        "se_resnet50",
        "inceptionv4",
        "dpn68",
        "xception",
        "tu-convnext_tiny",
    ]
    shape = (2, 3, 128, 128)
    found = {f"smp {name}": Network(segmentation(name), 2, shape) for name in names}
    found |= {
        f"smp Unet {encoder}": Network(segmentation("Unet", encoder), 2, shape)
        for encoder in encoders
    }
    return found


def more_networks() -> dict[str, Network]:
    """Return those of MONAI, transformers, diffusers, kornia and segmentation-models-pytorch."""
    return _monai() | _transformers() | _diffusers() | _kornia() | _segmentation()
