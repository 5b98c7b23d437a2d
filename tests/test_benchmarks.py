"""Tests of the benchmark scripts, and of the tables that the pages show."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a module of benchmarks/ as a script does."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def tables(script):
    return script("tables")


def test_the_tables_on_the_pages_match_the_raw_files(tables):
    pages = [page.read_text() for page in tables.PAGES]
    assert pages == list(map(tables.updated, pages)), "run python benchmarks/tables.py"
    named = re.findall(r"<!-- results: (.+) -->", "".join(pages))
    assert sorted(named) == sorted(tables.TABLES)


def test_a_changed_figure_changes_the_page(tables, tmp_path, monkeypatch):
    results = tmp_path / "results"
    shutil.copytree(tables.RESULTS, results)
    monkeypatch.setattr(tables, "RESULTS", results)
    page = "".join(page.read_text() for page in tables.PAGES)
    for name in sorted({name.split()[0] for name in tables.TABLES}):
        path = results / f"{name}.json"
        if not path.exists():  # not measured yet
            continue
        text = path.read_text()
        path.write_text(_longer(text))
        assert tables.updated(page) != page, name
        path.write_text(text)
    assert tables.updated(page) == page


def test_a_zoo_case_times_peers_recipes_and_the_choice_of_auto(script):
    def build():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.InstanceNorm2d(8), nn.Conv2d(8, 8, 3)
        )

    zoo = script("zoo")
    network = zoo.Network(build, 2, (1, 3, 16, 16))
    case = {"train": False, "precision": "bfloat16", "compile": False}
    found = {"network": "small"} | zoo.measure(network, case, budget=0.3, tune_budget=0.5)
    assert {
        "unprepared",
        *zoo.PEERS[:2],
        "auto",
        "channels_last",
        "bfloat16 + channels_last + repair + fuse",
    } <= set(found["rows"])
    choice = found["choices"]["auto"]
    assert found["rows"]["auto"] == found["rows"][choice["name"]]
    assert set(choice["candidates"]) <= set(found["rows"])
    assert "| small |" in "\n".join(zoo.tables([found]))
    without, matrices = (
        found
        | {"environment": found["environment"] | {"cpu": "a processor", "instructions": names}}
        for names in (["avx512_bf16"], ["amx_bf16", "avx512_bf16"])
    )
    heads = [line for line in zoo.tables([without, matrices]) if line.startswith("###")]
    assert heads == [
        "### Inference, bfloat16 allowed: a processor",
        "### Inference, bfloat16 allowed: a processor, with AMX",
    ]


def test_the_zoo_can_train_a_network_first(script):
    zoo = script("zoo")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 3))
    before = model[0].weight.detach().clone()
    network = zoo.Network(lambda: model, 2, (1, 3, 16, 16))
    zoo.warm_up(model, network, 20)
    assert not torch.equal(before, model[0].weight)
    both = torch.randn(2, 3, 16, 16) + torch.tensor([-0.5, 0.5]).reshape(2, 1, 1, 1)
    assert model(both)[:, :2].mean((2, 3)).argmax(1).tolist() == [0, 1]
    case = {"train": True, "precision": "float32", "compile": False, "warm_up": 2}
    found = {"network": "small"} | zoo.measure(network, case, budget=0.1, tune_budget=0.1)
    others = [{**found, "warm_up": steps, "train": bool(steps)} for steps in (50, 0)]
    heads = [line for line in zoo.tables([found, *others]) if line.startswith("###")]
    assert [head.partition(":")[0] for head in heads] == [
        "### Inference, float32 allowed",
        "### Training step, float32 allowed, after 2 steps of training",
        "### Training step, float32 allowed, after 50 steps of training",
    ]


def test_the_zoo_runs_enough_rounds_for_an_interval(script):
    class Slow(nn.Module):
        def forward(self, x):
            time.sleep(0.01)
            return x

    zoo = script("zoo")
    made = {name: (Slow(), None) for name in (zoo.UNPREPARED, "the same")}
    rows, _ = zoo.timed(made, torch.zeros(1), {"train": False}, 0.01, set(made))
    assert rows["the same"]["interval"]


def test_the_zoo_resumes_and_keeps_cases_of_other_processors(script, tmp_path, monkeypatch):
    zoo = script("zoo")
    case = {"train": True, "precision": "float32", "compile": False}
    elsewhere = {"network": "one", **case, "environment": {"cpu": "another one"}}
    here = {"environment": zoo.environment(), "aa": {"noise": 0.01}}
    too_few = {"network": "two", **case, **here, "aa": {"noise": None}}
    file = tmp_path / "zoo.json"
    file.write_text(json.dumps({"cases": [elsewhere, too_few]}))
    measured = []
    monkeypatch.setattr(zoo, "FILE", file)
    monkeypatch.setattr(zoo, "NETWORKS", {"one": "one", "two": "two"})
    monkeypatch.setattr(
        zoo, "apart", lambda _, name, case, *__: measured.append(name) or case | here
    )
    monkeypatch.setattr(zoo, "line_of", lambda case: "")
    for only, expected in (("one", ["one"]), ("", ["one", "two"]), ("", ["one", "two"])):
        arguments = ["zoo.py", "--mode", "train", "--precision", "float32", "--only", only]
        monkeypatch.setattr(sys, "argv", arguments)
        zoo.main()
        assert measured == expected
    monkeypatch.setattr(sys, "argv", [*arguments, "--compile"])
    zoo.main()
    assert measured == ["one", "two", "one", "two"]
    assert json.loads(file.read_text())["cases"] == [
        elsewhere,
        {"network": "two", **case, "compile": True, **here},
        {"network": "one", **case, "compile": True, **here},
    ]


def test_each_zoo_case_runs_in_a_new_process(script):
    zoo = script("zoo")
    assert len({os.getpid(), zoo.apart(os.getpid), zoo.apart(os.getpid)}) == 3
    with pytest.raises(BrokenProcessPool):
        zoo.apart(os._exit, 1)


def test_the_zoo_counts_where_auto_is_near_the_best_or_behind(script):
    tables = script("zoo_tables")

    def case(**rows):
        made = {"unprepared": row(1.0, None), **{n.replace("_", " "): r for n, r in rows.items()}}
        made["auto"] = made["mine"]
        names = [name for name in made if name not in {*tables.PEERS, "auto"}]
        choice = {"name": "mine", "candidates": dict.fromkeys(names, "slower")}
        found = {"rows": made, "choices": {"auto": choice}, "aa": {"ratio": 1.0, "noise": 0.01}}
        return found | {"precision": "bfloat16"}

    def row(ratio, interval, repeats=20):
        return {"ratio": ratio, "interval": interval, "repeats": repeats}

    near = case(mine=row(0.51, [0.49, 0.53]), better=row(0.5, [0.48, 0.52]))
    unclear = case(mine=row(0.55, [0.5, 0.6]), better=row(0.5, [0.45, 0.55]))
    behind = case(mine=row(0.9, [0.88, 0.92]), better=row(0.5, [0.45, 0.55]))
    beaten = case(mine=row(0.9, [0.88, 0.92]), in_one_round=row(0.1, None, repeats=1))
    beaten["rows"]["torch's converters"] = row(0.7, [0.68, 0.72])
    near["aa"]["ratio"], unclear["aa"]["ratio"], behind["aa"]["ratio"] = 1.05, 0.95, 1.02
    *_, said, _, control = tables.summary([near, unclear, behind, beaten])
    assert control.endswith("differs by more than 3% on 2 of 4.")
    assert (
        "within 3% of the best variant that it may choose on 2 of 4 networks, and significantly slower on 1 "
        in said
    )
    assert said.endswith(
        "On 3 no peer is faster by more than 3%; on 1 a peer is significantly faster."
    )
    found = [case(mine=row(0.8, None), bfloat16=row(ratio, None)) for ratio in (0.4, 0.1, 1.6)]
    fastest = "| the fastest of all, right or not | 3 | 0.32 | 0.10 | 0.80 |"
    assert fastest in tables.summary(found)
    assert tables.summary([*found, near])[-1] == (
        "The fastest recipe with bfloat16 takes 0.50 of the time of the fastest one without it, and more time "
        "on 1 of 3 networks. `auto` chose bfloat16 on no network."
    )
    found[0]["choices"]["auto"]["name"] = "bfloat16"  # of the time that stands for auto, 0.8
    found[2]["choices"]["auto"]["candidates"]["bfloat16"] = "cannot tell"
    assert tables.summary([*found, near])[-1] == (
        "The fastest recipe with bfloat16 takes 0.25 of the time of the fastest one without it, and more time "
        "on 0 of 2 networks. `auto` chose bfloat16 on 1 and takes 0.80 of the unprepared time there; on 1 no "
        "such recipe runs and passes verification."
    )
    found[2]["choices"]["auto, compiler allowed"] = {"name": "bfloat16 + compile"}
    found[2]["rows"]["auto, compiler allowed"] = row(0.5, None)
    said = tables.summary([*found, near])[-1]
    assert (
        "0.80 of the unprepared time there (with a compiler allowed: on 1, 0.50); on 1 no" in said
    )
    near["aa"]["noise"], found[0]["aa"] = None, None
    assert tables.summary([*found, near])[-1] == (
        "2 of 4 networks have too few rounds for an interval; their figures are rough."
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_benchmark_needs_a_cuda_device():
    done = subprocess.run([sys.executable, BENCHMARKS / "gpu.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == "there is no CUDA device here: nothing was measured, and nothing is reported\n"
    )


@pytest.fixture
def gpu(script):
    return script("gpu")


def test_a_dry_run_of_the_gpu_benchmark_runs_every_part(tmp_path, gpu, monkeypatch):
    file = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu.zoo, "measure", lambda network, case, **_: {**case, "rows": {}})
    layouts = {"ratios": {}, "dropped_rounds": 0}
    monkeypatch.setattr(gpu.gpu_layouts, "measure", lambda *_, **__: layouts)
    for name in ("line_of", "tables"):
        monkeypatch.setattr(gpu, name, lambda *_: "")
    words = ["gpu.py", "--dry-run", "--precision", "bfloat16", "--out", str(file)]
    monkeypatch.setattr(sys, "argv", words)
    gpu.main()
    found = json.loads(file.read_text())
    assert found["dry_run"]
    assert len(found["cases"]) == 4
    assert not found["left_out"]
    assert found["layout_cases"].keys() | found["layouts_left_out"].keys() == {
        *gpu.gpu_layouts.CASES
    }
    assert found["layouts"]["Softmax"] == "loses channels_last"
    assert found["environment"]["accelerator"]


@pytest.mark.parametrize(
    ("state", "slowed"),
    [
        (None, False),
        (["1", "2", "40", "0x0000000000000001"], False),
        (["1", "2", "85", "0x20"], True),
    ],
)
def test_a_throttled_device_is_recognised(gpu, state, slowed):
    assert gpu.throttled(state) is slowed


@pytest.mark.parametrize("decodes", [False, True])
def test_rounds_of_a_throttled_device_are_dropped(gpu, decodes):
    layouts = gpu.gpu_layouts
    case = layouts.LayoutCase(lambda: torch.nn.Conv2d(2, 2, 3), (2,), (1, 2, 4, 4), decodes)
    states = iter([["0x0"], ["0x0"], ["0x20"], *[["0x0"]] * 20])
    found = layouts.measure(
        case, "cpu", budget=0.0, clocks=lambda: next(states), throttled=gpu.throttled
    )
    assert found["dropped_rounds"] == 2  # the state before the next round is that after this one
    assert {name: len(each) for name, each in found["seconds"].items()} == dict.fromkeys(
        (layouts.CONTIGUOUS, layouts.AGAIN, layouts.LAST, layouts.REPAIRED), layouts.ENOUGH
    )
    assert len(found["clocks"]) == layouts.ENOUGH + 3
    assert layouts.line_of(found).startswith("contiguous 1.00, ")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_layout_case_of_the_gpu_benchmark_runs(gpu):
    for name, case in gpu.gpu_layouts.SMALL.items():
        if not gpu.missing(name):
            found = gpu.gpu_layouts.measure(
                case, "cpu", budget=0.0, clocks=lambda: None, throttled=gpu.throttled
            )
            assert found["ratios"][gpu.gpu_layouts.CONTIGUOUS] == 1.0


def _longer(text: str) -> str:
    """Return the file with each number replaced by its position in the file."""
    places = iter(range(1, 1 << 30))

    def changed(each):
        if isinstance(each, dict):
            return {key: changed(value) for key, value in each.items()}
        if isinstance(each, list):
            return [changed(value) for value in each]
        is_number = isinstance(each, int | float) and not isinstance(each, bool)
        return type(each)(next(places)) if is_number else each

    return json.dumps(changed(json.loads(text)))


def test_a_ratio_compares_times_of_the_same_round(tables):
    seconds = {variant: [1.0, 10.0, 1.0] for variant in tables.layout_repair.VARIANTS}
    seconds[tables.WITH] = [0.5, 5.0, 8.0]
    assert tables.layout_repair.ratio(seconds, tables.WITH) == 0.5
    assert tables.layout_repair.ratio(seconds, tables.AGAIN) == 1.0


def test_apply_is_timed_in_pairs_with_the_chain(script, monkeypatch):
    pairs = script("prepare_cost_pairs")
    monkeypatch.setattr(pairs, "CHANNELS", {size: {2: 8, 3: 8} for size in (1, 36, 150)})
    # In a process that has loaded much, each of the 200 collections takes half a second.
    monkeypatch.setattr("gc.collect", lambda: 0)
    found = pairs.run(1, minutes=0, gigabytes=1e-6)
    assert len(found["cases"]) == 12
    seconds = {"chain": [2.0, 3.0, 1.0], "apply": [1.0, 2.0, 1.0]}
    assert pairs.ratio(seconds, "apply") == 2 / 3


def test_settings_of_waiting_are_timed_in_processes(script):
    waiting = script("waiting")
    found = waiting.measure_apart("GOMP_SPINCOUNT=100", 0.01)
    rounds = [{"default": found, "GOMP_SPINCOUNT=100": found}]
    assert set(waiting.ratios(rounds, "GOMP_SPINCOUNT=100").values()) == {1.0}
    waiting.show(0, rounds)


def test_the_first_command_is_timed_at_each_load(script, monkeypatch):
    first = script("first_command")
    runs = iter([9.0, 9.0, 1.0, 4.0, 3.0, 6.0])  # the first of each load warms up
    monkeypatch.setattr(first, "run_once", lambda _: dict.fromkeys(first.COLUMNS, next(runs)))
    found = first.measure([0, 1], 2)
    assert {load: first.medians(each)["whole command"] for load, each in found.items()} == {
        "0": 2.0,
        "1": 5.0,
    }
