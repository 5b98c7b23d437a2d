"""Test where a guard works: in DDP, with FSDP, beside a compiler."""

import subprocess
import sys

import pytest
import torch

from guarded import images, prepared


def test_importing_the_guard_loads_no_torch():
    code = "import sys, prepare.guard; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


IN_A_GROUP = """
import sys, torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from prepare.pipeline import Pipeline
distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
def watched(steps, wrap):
    pipeline = Pipeline.from_config(steps)
    model = pipeline.apply(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    wrapped, batch = wrap(model), torch.randn(2, 3, 8, 8)
    guard = pipeline.guard(model, every=1, share=1e9)
    for _ in range(2):
        wrapped(batch).square().mean().backward()
        guard()
    return guard
guard = watched({"conv2d_memory_format": {}}, DistributedDataParallel)
print(guard.looks, guard.left_out)
print(watched({"half": {"dtype": "bfloat16"}, "input_format": {"attach": True}}, fully_shard))
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_guard_in_ddp_looks_and_with_fsdp_finds_drift_alone(tmp_path):
    run = [sys.executable, "-W", "ignore", "-c", IN_A_GROUP, tmp_path / "meeting"]
    lines = subprocess.check_output(run, text=True).splitlines()
    assert lines[0] == "6 {}"
    assert "it looks for drift alone" in lines[1]


def test_a_model_compiled_from_outside_is_not_looked_at():
    pipeline, model = prepared()
    guard = pipeline.guard(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(images())
        assert guard.looks == 0
        model(images())
        assert guard.looks > 0
