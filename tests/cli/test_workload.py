"""input.workload on the command line: a row for each size, mistakes, and sweeps."""

import pytest

from prepare.app.job.results import read_results

NET = (
    "model=unet2d",
    "model.width=2",
    "model.depth=2",
    "device=cpu",
    "memfmt=channels_last",
    "flow=none",
)
SIZES = "input.workload=[{shape: [1,1,8,8], weight: 10}, {shape: [2,1,8,8]}]"


def test_each_size_is_verified_and_the_heaviest_is_the_example(go):
    ran = go(*NET, SIZES)
    assert ran.code == 0
    assert "batch 1 pass: outputs at " in ran.page
    assert "[1, 1, 8, 8] float32 ->" in ran.page
    assert ran.result["figures"]["verified_at_batch_2"] == "pass"
    found = read_results(ran.folder)
    assert not found.problems
    assert [each.size.name for each in found.found["verify"].sizes] == ["batch 1", "batch 2"]


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("input.workload=3", "input.workload: 3 is not allowed; give a list, as in [{shape: [1,3,64,64], weight: 10}, {shape: [4,3,64,64]}]"),
        ("input.workload=[{shape: [1,1,8,8], weigth: 2}]", "input.workload[0].weigth: no such key; did you mean 'weight'? keys: shape, dtype, low, high, args, kwargs, factory, weight"),
        ("input.workload=[{shape: [1,1,8,8], weight: 0}, {weight: 0}]", "input.workload: every weight is 0; give one above 0"),
        ("input.workload=[{shape: [1,1,8,8]}, {shape: [1,1,8,8]}]", "input.workload[1]: has the same shapes as entry 0; give one of them, with the sum of their weights"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exits_2(go, word, line):
    ran = go(*NET, word)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[0] == line


def test_a_size_that_the_model_cannot_take_is_named(go):
    ran = go(*NET, "input.workload=[{shape: [1,1,8,8]}, {shape: [1,3,8,8]}]")
    assert ran.code == 1
    assert "1x3x8x8: RuntimeError: " in ran.err


@pytest.mark.slow
def test_workloads_and_their_parts_are_swept(go, tmp_path):
    words = ("--multirun", *NET, "task=plan", "isolate=false", "hydra.sweep.dir=sweep")
    words = (*words, "input.workload=[{shape: [1,1,8,8]},{}],[{shape: [4,1,8,8]},{}]")
    words = (*words, "+input.workload.1.shape=[2,1,8,8],[3,1,8,8]")
    assert go(*words).code == 0
    assert len(list(tmp_path.glob("sweep/*/result.json"))) == 4
    ran = go(*words, "resume=true")
    assert (ran.code, "4 of 4 rows ok" in ran.out) == (0, True)
