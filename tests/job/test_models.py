"""The built-in networks are what their papers say, and every shipped model configuration runs."""

from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from paths import CONF
from prepare.core.forward.call import tensors_in
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


def build_value(item: object) -> object:
    if not isinstance(item, Mapping):
        return item
    dtype = getattr(torch, item.get("dtype", "float32"))
    if dtype.is_floating_point:
        return torch.randn(item["shape"], dtype=dtype)
    return torch.randint(item["low"], item["high"], item["shape"], dtype=dtype)


def build_keywords(example: Mapping) -> dict[str, object]:
    return {name: build_value(item) for name, item in example.get("kwargs", {}).items()}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_every_model_configuration_builds_and_runs_its_example(path):
    config = OmegaConf.to_container(config_of(path.stem))
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
    found = [module for module in model.modules() if isinstance(module, CONVOLUTIONS_2D_3D)]
    assert Counter(map(type, found)) == {nn.Conv3d: 15, nn.ConvTranspose3d: 3}
    # In a single thread torch computes one of size 1 without channels-last.
    assert all(max(conv.kernel_size) > 1 for conv in found)


def test_an_input_that_cannot_be_halved_is_refused_with_the_factor():
    with pytest.raises(ValueError) as caught:
        UNet3d(1, width=2)(torch.randn(1, 1, 8, 12, 8))
    assert str(caught.value) == (
        "UNet3d: input of shape [1, 1, 8, 12, 8] cannot be halved 3 times; "
        "give spatial sizes that are multiples of 8"
    )
