"""Test on networks that the predicted flow equals the observed one."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from flow_checks import cl
from flow_nets import KNOWN_DIFFERENCES, NETS, example_of, network
from prepare.errors import ConfigError, RefusedError
from prepare.pipeline import Pipeline
from prepare.stages.flow import observe, predict


def differences(name: str) -> list[str]:
    """Return the parts in which the predicted and the observed flow differ, or the status without any."""
    model, example = network(name), example_of(name)
    flows = [flow_of(model, example) for flow_of in (predict, observe)]
    if flows[0].status != "ok":
        return [flows[0].status]
    parts = ("events", "copies", "convolutions", "notes")
    return [part for part in parts if getattr(flows[0], part) != getattr(flows[1], part)]


QUICK = ["diffusers_autoencoder_kl", "monai_segresnet3d", "monai_unet2d", "nnunet_plain2d",
         "resnet2d", "transformers_convnext", "unet3d"]  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_a_predicted_flow_equals_the_observed_one(name):
    assert differences(name) == []


REPAIRED = ["monai_dynunet3d", "monai_unet2d", "monai_unet3d", "nnunet_plain2d", "nnunet_plain3d",
            "nnunet_resenc2d", "nnunet_resenc3d", "unet3d"]  # fmt: skip


QUICK_REPAIRED = {("monai_unet2d", 2), ("nnunet_plain2d", 1), ("unet3d", 1)}


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        case if case in QUICK_REPAIRED else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(REPAIRED, (1, 2))
    ],
)
def test_a_repaired_network_has_no_break(name, batch):
    formats = {"conv2d_memory_format": {}, "conv3d_memory_format": {}}
    pipeline = Pipeline.from_config({**formats, "repair_layout": {}, "input_format": {}})
    model = pipeline.apply(network(name), strict=False)
    example = example_of(name)
    args = tuple(pipeline.format(tensor[:batch]) for tensor in example.args)
    flows = [flow_of(model, args) for flow_of in (predict, observe)]
    for flow in flows:
        assert flow.status == "ok", flow.reason
        assert flow.summary["breaks"] == 0
    assert flows[0].copies == flows[1].copies
    assert flows[0].convolutions == flows[1].convolutions


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_every_network_is_predicted_or_listed_as_different(name):
    assert differences(name) == list(KNOWN_DIFFERENCES.get(name, ()))


def made_of_kernels(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        parts = [nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3), nn.ReflectionPad2d(1)]
        net = nn.Sequential(*parts, nn.Conv2d(8, 8, 1), nn.MaxPool2d(2))
    return net.to(memory_format=torch.channels_last)


def test_a_model_on_the_meta_device_is_predicted_for_the_cpu():
    image = cl(2, 3, 16, 16)
    for example in (image, image.to("meta")):
        flow = predict(made_of_kernels("meta"), example)
        assert flow.notes == ("predicted for the CPU: the model is on the meta device",)
        expected = predict(made_of_kernels(), image)
        assert replace(flow, notes=()) == expected
        assert flow.device == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has kernels that torch can ask")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_gpu_that_is_not_here_is_predicted_by_rules(device):
    model, image = made_of_kernels(device), cl(2, 3, 16, 16)
    flow = predict(model, image, device="cuda")
    assert flow.device == "cuda"
    assert flow.notes[0].startswith("predicted for a CUDA that is not here: ")
    assert [each.module for each in flow.events] == ["1", "3"]
    assert {row.backend for row in flow.convolutions} == {"Cudnn"}
    assert flow.summary["in_layout"] == 3
    double = predict(model.double(), image.double(), device="cuda")
    assert double.summary["in_layout"] == 0


def test_a_device_that_is_not_known_is_refused():
    for device, error, text in (
        ("gpuu", ConfigError, "device: 'gpuu' is not a device; write cpu or cuda"),
        ("xpu", RefusedError, "device: there is no xpu here, and its layouts are not known"),
    ):
        with pytest.raises(error, match=text):
            predict(made_of_kernels(), cl(2, 3, 16, 16), device=device)
