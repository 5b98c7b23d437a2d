"""Count over many networks, faults, threads, processes and lines what a guard must never do."""

import copy
import subprocess
import sys
import threading
import warnings
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from guard_faults import FLAT, PLANTED, RIGHT, SERVED, WRONG, leaves
from guarded import ALL, Block, images, prepared
from prepare.errors import DriftError, GuardError
from prepare.pipeline import Pipeline
from test_guard_apart import flat, surroundings, traced
from verify_faults import Net

WAYS = {
    "flat": FLAT,
    "repaired": FLAT | {"repair_layout": {"force": True}},
    "rewritten": FLAT | {"keep_layout": {}},
    "attached": {"conv2d_memory_format": {}, "input_format": {"attach": True}},
}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SERVED)
def test_no_planted_fault_is_silent_with_fallback(name):
    for steps in WAYS.values():
        torch.manual_seed(0)
        plain = Net().eval()
        pipeline, model = Pipeline.from_config(steps), copy.deepcopy(plain)
        pipeline.apply(model, known_issues="ignore")
        guard = pipeline.guard(model, on_difference="fallback")
        batch = torch.randn(2, 3, WRONG, WRONG)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(pipeline.format(torch.randn(2, 3, RIGHT, RIGHT)))
            PLANTED[name](model)
            try:
                found = leaves(model(pipeline.format(batch)))
            except (GuardError, DriftError):
                continue
            assert guard.differences
            torch.testing.assert_close(found, leaves(plain(batch)), rtol=1e-4, atol=1e-4)


def test_four_threads_get_the_numbers_of_a_model_without_a_guard():
    for _ in range(25):
        pipeline, model = prepared()
        batches = [images(size) for size in (12, 14, 16, 18)]
        with torch.no_grad():
            expected = [model(batch) for batch in batches]
        guard, wrong = pipeline.guard(model), []

        def serve(first, model=model, batches=batches, expected=expected, wrong=wrong):
            with torch.no_grad():
                for index in [*range(first, 4), *range(first)] * 4:
                    if not torch.equal(model(batches[index]), expected[index]):
                        wrong.append(index)

        threads = [threading.Thread(target=serve, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (wrong, guard.differences, guard.left_out, guard.running) == ([], [], {}, {})


@pytest.mark.parametrize("training", [False, True])
def test_an_interrupt_at_every_line_of_a_look_leaves_no_trace(training):
    pipeline, model = flat(nn.Conv2d(3, 4, 1), Outer(), training=training)
    batch = images(4)
    guard = pipeline.guard(model, every=1, share=ALL)
    before = surroundings(model)

    def step():
        with torch.set_grad_enabled(training):
            output = model(batch)
        if training:
            output.sum().backward()
        guard()

    stop, is_stopped = 1, True
    while is_stopped:
        for watched in guard._hooked.values():
            watched.known.clear()
        is_stopped = traced(step, stop) == stop
        model.zero_grad()
        assert surroundings(model) == before, f"at line {stop}"
        stop += 1
    assert stop > 300
    step()
    assert guard.differences == []


class Outer(nn.Module):
    """A module with code of its own around another."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv(x).relu() + x


LAYERS = {
    "equal": lambda: [nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(4)],
    "composite": lambda: [nn.Conv2d(8, 8, 3, padding=1), Block(), nn.Conv2d(16, 8, 1)],
    "dropout": lambda: [nn.Conv2d(8, 8, 1), nn.Dropout(0.5), nn.BatchNorm2d(8), nn.GELU()],
}


@pytest.mark.parametrize("layers", LAYERS)
def test_a_look_inside_a_checkpoint_changes_no_gradient(layers):
    for reentrant, training, half, inside in product([False, True], repeat=4):

        def gradients(*, guarded, reentrant=reentrant, training=training, half=half, inside=inside):
            torch.manual_seed(0)
            pipeline, model = flat(*LAYERS[layers](), training=training)
            guard = pipeline.guard(model, every=2, share=ALL) if guarded else lambda: None
            for step in range(3):
                torch.manual_seed(step)
                batch = torch.randn(2, 8, 8, 8).contiguous(memory_format=torch.channels_last)
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    if inside:  # each layer is a segment
                        output = batch.requires_grad_()
                        for layer in model:
                            output = checkpoint(layer, output, use_reentrant=reentrant)
                    else:
                        output = checkpoint(model, batch.requires_grad_(), use_reentrant=reentrant)
                output.float().square().mean().backward()
                guard()
            assert not guarded or guard.differences == []
            return [parameter.grad for parameter in model.parameters()]

        assert all(map(torch.equal, gradients(guarded=False), gradients(guarded=True)))


IN_TWO_PROCESSES = """
import sys, torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from prepare.pipeline import Pipeline
rank, meeting, guarded = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "guarded"
distributed.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=2)
MODES = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True},
         {"broadcast_buffers": False}]
for options in MODES:
    torch.manual_seed(0)
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}, "repair_layout": {"force": True}})
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 1))
    pipeline.apply(model, known_issues="ignore")
    wrapped = DistributedDataParallel(model, **options)
    guard = pipeline.guard(model, every=2, share=1e9) if guarded else None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        wrapped(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if guarded:
            guard()
    if guarded:
        assert (guard.differences, guard.left_out) == ([], {}) and guard.looks > 0
    print([tensor.double().sum().item() for tensor in model.state_dict().values()])
distributed.destroy_process_group()
"""


def test_each_mode_of_ddp_trains_as_without_a_guard(tmp_path):
    def trained(kind):
        run = [sys.executable, "-W", "ignore", "-c", IN_TWO_PROCESSES]
        both = [
            subprocess.Popen([*run, str(rank), tmp_path / kind, kind], stdout=-1, text=True)
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=200)[0].splitlines() for process in both]
        assert [process.returncode for process in both] == [0, 0]
        return outputs

    plain, guarded = trained("plain"), trained("guarded")
    assert [len(lines) for lines in plain] == [5, 5]
    assert guarded == plain
