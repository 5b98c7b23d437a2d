"""The built-in networks are what their papers say, and every shipped model configuration runs."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from paths import CONF
from prepare.core.model.module_kinds import CONVOLUTIONS_2D_3D
from prepare.models.resnet import ResNet2d
from prepare.models.unet import UNet2d, UNet3d
from small_nets import build, config_of

MODELS = sorted(path for path in CONF.glob("model/*.yaml") if path.stem != "custom")
INPUTS = sorted(CONF.glob("input/*.yaml"))
NETWORKS = [UNet2d, UNet3d, ResNet2d]
NORMALISATIONS = (
    *(nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.GroupNorm, nn.LayerNorm),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    # On tensors this small two threads mostly wait for each other: four times as long when busy.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_stem(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=[path.stem for path in paths])


def skip_unless_importable(target: str) -> None:
    package = target.partition(".")[0]
    try:
        importlib.import_module(package)
    # torchvision built for another torch raises RuntimeError or OSError, not ImportError.
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"{package} cannot be imported: {error}")


def build_value(item: object) -> object:
    if not isinstance(item, Mapping):
        return item
    dtype = getattr(torch, item.get("dtype", "float32"))
    if dtype.is_floating_point:
        return torch.randn(item["shape"], dtype=dtype)
    return torch.randint(item["low"], item["high"], item["shape"], dtype=dtype)


def build_keywords(example: Mapping) -> dict[str, object]:
    return {name: build_value(item) for name, item in example.get("kwargs", {}).items()}


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_in(value)


def kinds(model: nn.Module, *wanted: type[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, wanted)]


def example_for(network: type[nn.Module]) -> torch.Tensor:
    return torch.randn([2, 1] + [16] * (3 if network is UNet3d else 2))


@by_stem(MODELS)
def test_every_model_configuration_builds_and_runs_its_example(path):
    config = OmegaConf.to_container(config_of(path.stem))
    skip_unless_importable(config["model"]["_target_"])
    torch.manual_seed(0)
    model = build(path.stem)
    with torch.no_grad():
        output = model(build_value(config["input"]), **build_keywords(config["input"]))
    found = list(tensors_in(output))
    assert found
    assert found[0].shape[0] == config["input"]["shape"][0]
    assert all(tensor.isfinite().all() for tensor in found)


@by_stem(MODELS)
def test_every_model_configuration_has_a_comment_and_an_example(path):
    package, comment, *_ = path.read_text(encoding="utf-8").splitlines()
    assert package == "# @package _global_"
    assert comment.startswith("# ")
    config = config_of(path.stem)
    assert set(config) == {"model", "input"}
    assert config.input.shape[0] >= 2


def test_the_custom_model_leaves_its_target_open():
    config = OmegaConf.load(CONF / "model" / "custom.yaml")
    assert config.model._target_ is None


@by_stem(INPUTS)
def test_every_input_configuration_is_a_tensor(path):
    item = OmegaConf.to_container(OmegaConf.load(path))
    tensor = build_value(item)
    assert list(tensor.shape) == item["shape"]
    assert str(tensor.dtype) == f"torch.{item['dtype']}"


def test_a_unet3d_has_the_eighteen_convolutions_of_the_paper():
    model = UNet3d(1)
    assert len(kinds(model, *CONVOLUTIONS_2D_3D)) == 18
    assert len(kinds(model, nn.Conv3d)) == 15
    assert len(kinds(model, nn.ConvTranspose3d)) == 3
    # In a single thread torch computes one of size 1 without channels-last.
    assert all(max(conv.kernel_size) > 1 for conv in kinds(model, *CONVOLUTIONS_2D_3D))


def test_a_unet2d_has_the_same_convolutions_in_2d():
    model = UNet2d(1)
    assert len(kinds(model, *CONVOLUTIONS_2D_3D)) == 18
    assert len(kinds(model, nn.Conv2d)) == 15
    assert len(kinds(model, nn.ConvTranspose2d)) == 3


@pytest.mark.parametrize("network", [UNet2d, UNet3d])
def test_a_unet_of_width_32_has_the_channels_of_the_paper(network):
    with torch.device("meta"):
        model = network(3, out_channels=3, width=32)
    encoder = [[block.conv1.out_channels, block.conv2.out_channels] for block in model.encoder]
    decoder = [[block.conv1.in_channels, block.conv2.out_channels] for block in model.decoder]
    assert encoder == [[32, 64], [64, 128], [128, 256], [256, 512]]
    assert [up.out_channels for up in model.upsample] == [512, 256, 128]
    assert decoder == [[256 + 512, 256], [128 + 256, 128], [64 + 128, 64]]
    assert (model.head.in_channels, model.head.out_channels) == (64, 3)


def test_a_unet3d_has_as_many_parameters_as_the_paper_reports():
    with torch.device("meta"):
        model = UNet3d(3, out_channels=3, width=32)
    # The paper's sum: one bias a convolution, none for a transposed one, no normalisation.
    weights = sum(conv.weight.numel() for conv in kinds(model, *CONVOLUTIONS_2D_3D))
    biases = sum(conv.out_channels for conv in kinds(model, nn.Conv3d))
    # The paper's head has a kernel of one voxel, not of 27.
    assert weights + biases - model.head.weight.numel() * 26 // 27 == 19_069_955


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("network", [UNet2d, UNet3d])
def test_a_unet_keeps_the_size_of_its_input(network, depth):
    sizes = [2**depth, 2 ** (depth - 1), 2 ** (depth - 1)][: network.dims]
    model = network(2, out_channels=3, width=2, depth=depth).eval()
    with torch.no_grad():
        output = model(torch.randn(1, 2, *sizes))
    assert list(output.shape) == [1, 3, *sizes]
    assert len(kinds(model, *CONVOLUTIONS_2D_3D)) == 2 * depth + 3 * (depth - 1) + 1


def test_a_resnet2d_halves_the_size_at_every_stage_after_the_first():
    model = ResNet2d(3, classes=7, width=4, blocks=[1, 2, 1]).eval()
    sizes = []
    for stage in model.stages:
        stage.register_forward_hook(lambda _, __, output: sizes.append(list(output.shape[1:])))
    with torch.no_grad():
        output = model(torch.randn(2, 3, 16, 16))
    assert sizes == [[4, 16, 16], [8, 8, 8], [16, 4, 4]]
    assert list(output.shape) == [2, 7]


def test_resnet2d_projects_by_a_1x1_convolution():
    model = ResNet2d(3, width=4, blocks=[2, 2, 2])
    projected = [[bool(kinds(block.shortcut, nn.Conv2d)) for block in st] for st in model.stages]
    assert projected == [[False, False], [True, False], [True, False]]
    assert sum(conv.kernel_size == (1, 1) for conv in kinds(model, nn.Conv2d)) == 2


@pytest.mark.parametrize(
    ("network", "norm", "kind", "count"),
    [
        (UNet2d, "batch", nn.BatchNorm2d, 14),
        (UNet2d, "group", nn.GroupNorm, 14),
        (UNet2d, "instance", nn.InstanceNorm2d, 14),
        (UNet3d, "batch", nn.BatchNorm3d, 14),
        (UNet3d, "group", nn.GroupNorm, 14),
        (UNet3d, "instance", nn.InstanceNorm3d, 14),
        (ResNet2d, "batch", nn.BatchNorm2d, 15),
        (ResNet2d, "group", nn.GroupNorm, 15),
        (ResNet2d, "instance", nn.InstanceNorm2d, 15),
    ],
)
def test_a_norm_is_the_one_asked_for_everywhere(network, norm, kind, count):
    found = kinds(network(1, width=4, norm=norm), *NORMALISATIONS)
    assert [type(module) for module in found] == [kind] * count


@pytest.mark.parametrize("norm", ["batch", "group", "instance"])
@pytest.mark.parametrize("network", NETWORKS)
def test_every_parameter_of_a_built_in_network_gets_a_gradient(network, norm):
    torch.manual_seed(0)
    model = network(1, width=4, norm=norm)
    model(example_for(network)).square().sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


@pytest.mark.parametrize("network", NETWORKS)
def test_an_unknown_norm_is_refused_with_the_nearest_name(network):
    with pytest.raises(ValueError, match="norm: 'grop' is not a normalisation") as caught:
        network(1, norm="grop")
    assert str(caught.value).endswith("did you mean 'group'? allowed: batch, group, instance")


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (UNet3d, {"depth": 0}, "depth: 0 is not a count; give a whole number of at least 1"),
        (UNet2d, {"width": 1.5}, "width: 1.5 is not a count; give a whole number of at least 1"),
        (
            ResNet2d,
            {"blocks": []},
            "blocks: [] is not a list of counts; give one for each stage, as in [2,2,2]",
        ),
        (
            ResNet2d,
            {"blocks": [1, 0]},
            "blocks: 0 is not a count; give a whole number of at least 1",
        ),
    ],
)
def test_a_wrong_count_is_refused_by_name(network, options, message):
    with pytest.raises(ValueError) as caught:
        network(1, **options)
    assert str(caught.value) == message


def test_an_input_that_cannot_be_halved_is_refused_with_the_factor():
    with pytest.raises(ValueError) as caught:
        UNet3d(1, width=2)(torch.randn(1, 1, 8, 12, 8))
    assert str(caught.value) == (
        "UNet3d: input of shape [1, 1, 8, 12, 8] cannot be halved 3 times; "
        "give spatial sizes that are multiples of 8"
    )
