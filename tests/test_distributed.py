"""Training in several processes: preparing before wrapping is exact, and what would go wrong is refused everywhere."""

import json
import os
import re
import subprocess
import sys

import pytest

import ranks as on_ranks
from paths import CONF, PYTHONPATH
from prepare.app.cli import main as cli
from prepare.pipeline.distributed import rank

ROOT = CONF.parent
NET = (
    "model._target_=sample_nets.Net",
    "input.shape=[2,3,16,16]",
    "device=cpu",
    "memfmt=channels_last",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    started = on_ranks.Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.stop()


# ------------------------------------------------------------------------------- DDP


@pytest.mark.parametrize("view", [False, True])
def test_preparing_before_ddp_gives_the_gradients_of_one_process(ranks, view):
    for warned, off, in_line, stride in ranks(on_ranks.ddp, "before", view):
        assert warned == []
        assert off < 1e-14
        assert in_line
        assert stride == (27, 1, 9, 3)


def test_converting_after_ddp_is_what_torch_warns_of(ranks):
    for warned, *_ in ranks(on_ranks.ddp, "after, by torch", False):
        assert any("bucket view" in each for each in warned)


def test_rank_0_chooses_the_rewrites_of_all_ranks(ranks):
    for kinds, late in ranks(on_ranks.rewritten_by_time):
        assert kinds == ["PointwiseConv2d", "Conv2d"]
        assert late[0] == "RefusedError"
        assert "wrap it" in late[1]


# Steps, dimensions, and gradient_as_bucket_view.
SILENT = [
    pytest.param(half, dimensions, view, marks=pytest.mark.slow if half or dimensions == 3 else ())
    for half in ({}, {"half": {"dtype": "bfloat16"}})
    for dimensions in (2, 3)
    for view in (False, True)
]


@pytest.mark.parametrize(("half", "dimensions", "view"), SILENT)
def test_ddp_is_silent_over_every_kind_of_convolution(ranks, half, dimensions, view):
    steps = {**on_ranks.ALL_RANKS, **half}
    for warned in ranks(on_ranks.ddp_every_kind, steps, dimensions, view):
        assert warned == []


def test_training_on_two_ranks_gives_the_weights_of_one_process(ranks):
    for off, drifts in ranks(on_ranks.ddp_training):
        assert off < 1e-12
        assert drifts == []


def test_rank_0_tunes_for_all_ranks(ranks):
    (first, _), (second, _) = ranks(on_ranks.tuned, 3)
    assert first == second != []
    (_, first), (_, second) = ranks(on_ranks.tuned, 2)
    assert (first[0], second[0]) == ("ModelError", "RefusedError")
    assert second[1].startswith("rank 0: ")


# ------------------------------------------------------------------------------- ranks that disagree

DISAGREE = {
    on_ranks.layout: r"0\.weight: .*stride .* on rank 0, and .*stride .* on rank 1",
    on_ranks.dtype: r"2\.bias: \w*float\d+ of .* on rank 0, and \w*float\d+ of .* on rank 1",
    on_ranks.missing: r"0\.bias: .*missing on rank \d",
    on_ranks.order: r"the model: its tensors are in another order on rank 1",
}


@pytest.mark.parametrize("change", DISAGREE, ids=lambda change: change.__name__)
@pytest.mark.parametrize("which", [0, 1])
def test_ranks_that_disagree_are_refused_before_any_collective(ranks, change, which):
    (first, total), (second, _) = ranks(on_ranks.disagree, change, which)
    assert first == second
    kind, said = first
    assert kind == "RefusedError"
    assert re.search(DISAGREE[change], said), said
    assert total == 2, "the process group goes on as if nothing had been"


# ------------------------------------------------------------------------------- FSDP

FLAT_STRIDES = {
    "0": ((27, 1, 9, 3), (800, 1, 80, 8)),
    "2": ((8, 1, 8, 8), (800, 1, 80, 8)),
    "4": ((72, 1, 24, 8), (256, 1, 32, 4)),
}


@pytest.mark.parametrize(
    ("original", "strategy"),
    [
        (False, "FULL_SHARD"),
        (True, "FULL_SHARD"),
        pytest.param(True, "SHARD_GRAD_OP", marks=pytest.mark.slow),
        pytest.param(True, "NO_SHARD", marks=pytest.mark.slow),
    ],
)
def test_fsdp_keeps_what_was_prepared_before_it_in_every_forward(ranks, original, strategy):
    for seen, off in ranks(on_ranks.fsdp1, original, strategy):
        assert seen == FLAT_STRIDES
        assert off < 1e-14 if original else off is None


@pytest.mark.parametrize(
    ("steps", "bound"),
    [
        ({}, 1e-14),
        ({"half": {"dtype": "bfloat16", "keep": []}, "input_format": {}}, 1e-2),
        ({"conv2d_memory_format": {"include": ["2"]}}, 1e-14),
        ({"input_format": {"memory_format": "channels_last"}}, 1e-14),
    ],
    ids=["nothing", "a cast", "a 1x1 kernel", "inputs only"],
)
def test_fully_shard_takes_what_keeps_weights_contiguous(ranks, steps, bound):
    for off, outputs in ranks(on_ranks.fsdp2, steps):
        assert off < bound
        if steps.get("input_format", {}).get("memory_format"):
            # The way out: activations in channels_last, the weights as FSDP wants them.
            assert outputs == [(800, 1, 80, 8), (800, 1, 80, 8), (256, 1, 32, 4)]


# ------------------------------------------------------------------------------- too late

TOO_LATE = {
    "DDP": "DistributedDataParallel: is wrapped.*; prepare the module first, then wrap it",
    "FSDP1": "FullyShardedDataParallel: is sharded by FSDP; prepare the module first, then shard it",
    "FSDP1 with its original parameters": "FullyShardedDataParallel: is sharded by FSDP; prepare the",
    "FSDP2": "FSDPSequential: is sharded by FSDP; prepare the module first, then shard it",
}


@pytest.mark.parametrize("kind", TOO_LATE)
def test_preparing_after_wrapping_is_refused_with_the_way_out(ranks, kind):
    for said, untouched in ranks(on_ranks.wrapped_already, kind):
        for refused in said:
            assert refused is not None
            name, words = refused
            assert name == "RefusedError"
            assert re.match(TOO_LATE[kind], words), words
        assert untouched


# ------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, 0),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "2"}, 0),
        ({"RANK": "1"}, 0),  # somebody's own variable
        ({"RANK": "first", "WORLD_SIZE": "2"}, 0),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, 3),
    ],
)
def test_the_rank_is_that_of_torchrun(monkeypatch, environment, number):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rank() == number


@pytest.mark.parametrize(
    "words", [NET, ("model=nothing",), ("steps",), ("--help",), ("-m", *NET)], ids=" ".join
)
def test_any_other_rank_says_nothing_and_leaves_nothing(monkeypatch, tmp_path, capsys, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run(list(words)) == 0
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def torchrun(folder, *words):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*run, str(ROOT / "run.py"), *words],
        capture_output=True, text=True, check=False, cwd=folder, timeout=200,
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_under_torchrun_there_is_one_folder_one_record_and_one_table(tmp_path):
    done = torchrun(tmp_path, "model=unet2d", "memfmt=channels_last", "device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("convolutions converted") == 1
    (result,) = tmp_path.rglob("result.json")
    assert json.loads(result.read_text())["status"] == "ok"
    assert len(list(tmp_path.rglob("audit.json"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    # Without torchrun it is the same audit, byte for byte.
    words = ("model=unet2d", "memfmt=channels_last", "device=cpu", "hydra.run.dir=alone")
    command = [sys.executable, str(ROOT / "run.py"), *words]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, timeout=200)
    for name in ("audit.json", "recipe.yaml", "plan.json"):
        assert (tmp_path / "alone" / name).read_bytes() == (result.parent / name).read_bytes()
