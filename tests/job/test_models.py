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
from prepare.models.unet import UNet3d
from small_nets import build, config_of

MODELS = sorted(path for path in CONF.glob("model/*.yaml") if path.stem != "custom")


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


def test_a_unet3d_has_the_eighteen_convolutions_of_the_paper():
    model = UNet3d(1)
    assert len(kinds(model, *CONVOLUTIONS_2D_3D)) == 18
    assert len(kinds(model, nn.Conv3d)) == 15
    assert len(kinds(model, nn.ConvTranspose3d)) == 3
    # In a single thread torch computes one of size 1 without channels-last.
    assert all(max(conv.kernel_size) > 1 for conv in kinds(model, *CONVOLUTIONS_2D_3D))


def test_an_input_that_cannot_be_halved_is_refused_with_the_factor():
    with pytest.raises(ValueError) as caught:
        UNet3d(1, width=2)(torch.randn(1, 1, 8, 12, 8))
    assert str(caught.value) == (
        "UNet3d: input of shape [1, 1, 8, 12, 8] cannot be halved 3 times; "
        "give spatial sizes that are multiples of 8"
    )
