"""A flow names the places in the user's own code."""

import contextlib
import types

import pytest
import torch

from prepare.pipeline import Pipeline
from prepare.stages.flow import predict

NETS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x)).contiguous()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block(), nn.Conv2d(4, 4, 3))

    @torch.no_grad()
    def forward(self, x):
        x = self.blocks(x)
        return x.contiguous()
"""


@pytest.fixture(scope="module")
def flow(tmp_path_factory):
    """The flow of a network in the folder `nets.py` of a user, who is in that folder."""
    folder, nets = tmp_path_factory.mktemp("nets"), types.ModuleType("nets")
    (folder / "nets.py").write_text(NETS)
    exec(compile(NETS, str(folder / "nets.py"), "exec"), vars(nets))
    model = nets.Net().eval()
    Pipeline.from_config({"conv2d_memory_format": {}}).apply(model, known_issues="ignore")
    example = torch.randn(1, 4, 12, 12).to(memory_format=torch.channels_last)
    with contextlib.chdir(folder):
        return predict(model, example)


def test_a_flow_names_the_line_of_each_forward_of_the_user(flow):
    by_name = {each.name: each for each in flow.modules}
    assert by_name[""].source == "nets.py:18"
    assert (by_name["blocks"].source, by_name["blocks"].given) == ("", "channels_last")
    lines = {each.source for each in flow.events if each.kind == "break"}
    assert "nets.py:21" in lines
