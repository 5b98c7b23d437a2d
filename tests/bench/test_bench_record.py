"""The record of a bench: saved, loaded, refused, in sentences and on its page."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import made
from clocks import Clock, noisy
from made import comparison, verification
from page_reader import HOSTILE, Reader
from prepare.app.job.record import Record, Result
from prepare.core.document import ReportContext
from prepare.core.utils.numbers import seconds
from prepare.errors import BenchError
from prepare.stages.bench import Comparison, compare
from prepare.stages.bench.document import bench_document, speed_sentence
from prepare.stages.bench.records import PROCESSOR

BATCH = torch.ones(4, 3)


@pytest.fixture(scope="module")
def found():
    clock = Clock()
    variants = {
        name: clock.takes(noisy(mean, 0.01, name))
        for name, mean in {"plain": 0.1, "quick": 0.05, "same": 0.1}.items()
    }
    variants["broken"] = clock.takes(0.1, breaks_at=1)
    return compare(variants, BATCH, budget=60, _clock=clock)


def test_a_comparison_survives_saving_and_loading(found, tmp_path):
    found.save(tmp_path / "bench.json")
    assert Comparison.load(tmp_path / "bench.json") == found
    data = json.loads((tmp_path / "bench.json").read_text())
    assert (data["format"], data["version"]) == ("prepare.bench", 1)
    assert data["environment"]["threads"] == torch.get_num_threads()
    known = {"threads", "cores_available", "load_before", "others", "timer", "seed"}
    assert known <= data["settings"].keys()


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"format": "prepare.flow"}, "this is a prepare.flow, not a prepare.bench"),
        ({"version": 2}, "version 2 is not known here; this prepare reads version 1"),
        ({"baseline": "none"}, "this is not a comparison: KeyError: 'none'"),
        ({"aa": {}}, "this is not a comparison: ValueError: the keys are []"),
    ],
)
def test_a_file_that_is_not_a_bench_is_refused_with_the_reason(found, tmp_path, change, wrong):
    path = tmp_path / "bench.json"
    found.save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | change))
    with pytest.raises(BenchError) as raised:
        Comparison.load(path)
    assert str(raised.value).startswith(f"{path}: {wrong}")


def test_an_unknown_verdict_is_refused(found, tmp_path):
    path = tmp_path / "bench.json"
    found.save(path)
    path.write_text(path.read_text().replace('"faster"', '"best"'))
    with pytest.raises(BenchError, match="'best' is not a verdict"):
        Comparison.load(path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (123.4, "123 s"),
        (0.9999, "1.00 s"),
        (0.0456, "45.6 ms"),
        (2e-6, "2.00 us"),
    ],
)
def test_times_are_shown_with_three_digits(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (comparison(), "inference 1.4x faster, 29.2 instead of 40.0 ms (95 % interval: 1.32x to 1.43x)"),
        (comparison(1.0, verdict="no difference", interval=(0.98, 1.02)),
         "inference no difference, 40.0 ms (95 % interval: 1.02x slower to 1.02x faster)"),
        (comparison(verdict="unclear"), "inference unclear (95 % interval: 1.32x to 1.43x faster), as the interval is too wide"),
        (comparison(verdict="unclear", interval=(0.002, 2620.0)), "inference unclear (95 % interval: 2,620x slower to 500x faster), as the interval is too wide"),
        (comparison(verdict="unclear", interval=None), "inference unclear, as the interval is too wide"),
        (comparison(1.2, verdict="slower", interval=(1.1, 1.3)), "inference 1.2x slower, 48.0 instead of 40.0 ms (95 % interval: 1.10x to 1.30x)"),
        (comparison(45.0, verdict="slower", interval=(44, 46)), "inference 45x slower, 1.80 s instead of 40.0 ms (95 % interval: 44x to 46x)"),
        (comparison(17.0, verdict="slower", interval=(11, 35)), "inference over 10x slower (95 % interval: 11x to 35x)"),
        (comparison(17.0, verdict="slower", interval=(2, 35)), "inference over 2x slower (95 % interval: 2.0x to 35x)"),
    ],
)  # fmt: skip
def test_a_comparison_is_described_in_one_sentence(found, said):
    assert speed_sentence(found) == said


def test_the_sentence_says_which_clock_a_verdict_follows():
    busy = {"timer": PROCESSOR, "cores_available": 2, "others": 1.6, "threads": 2}
    found = comparison(settings=comparison().settings | busy)
    said = "processor time, as this machine is busy (other programs use 1.6 of 2 cores)"
    assert speed_sentence(found).endswith(f"; {said}")
    (answer,) = bench_document(ReportContext(found={"bench": found})).answers
    assert said in answer.line
    assert said in answer.remark


def test_a_busy_machine_is_a_reason_and_a_line():
    busy = {"cores_available": 2, "others": 1.6, "threads": 2}
    found = comparison(settings=comparison().settings | busy)
    assert found.busy == ""  # the unprepared model hardly differed from itself
    loud = replace(found, aa=replace(found.aa, noise=1.1))
    said = "this machine is busy (other programs use 1.6 of 2 cores); repeat it later for a firm figure"
    assert loud.busy == said
    assert comparison().busy == ""


def page_of(folder, found, checked=None):
    folder.mkdir(exist_ok=True)
    found.save(folder / "bench.json")
    Record(folder).write_result(Result("ok"))
    if checked:
        checked.save(folder / "verify.json")
    return made.page_of(folder)


def test_the_page_shows_the_figures_the_charts_and_the_notes(tmp_path):
    text = page_of(tmp_path, comparison(), verification())
    read = Reader(text)
    for said in (
        "Inference 1.4x faster, 29.2 instead of 40.0 ms (95 % interval: 1.32x to 1.43x)",
        "prepared 29.2 ms 1.4x faster 1.32x to 1.43x",
        "20 rounds in 3.20 s, 2 threads, wall clock; the baseline against itself: differences below 1.0 % are noise",
        "a note",
        "Faster 1.4x faster, 29.2 instead of 40.0 ms",
    ):
        assert said in read.text, said
    assert text.count('<p class="bar') == 2


def test_the_page_shows_why_nothing_was_compared(tmp_path):
    found = replace(comparison(), rows=(), aa=None, repeats=0, reason="too long for it")
    text = page_of(tmp_path, found)
    assert "Inference not measured: too long for it" in Reader(text).text
    assert '<p class="bar' not in text


def test_names_in_a_bench_are_escaped_on_the_page(tmp_path):
    hostile = [
        replace(row, name=HOSTILE[at], reason="\n".join(HOSTILE), verdict=row.verdict)
        for at, row in enumerate(comparison().rows)
    ]
    found = comparison(rows=tuple(hostile), baseline=HOSTILE[0], notes=tuple(HOSTILE))
    safe = Reader(page_of(tmp_path / "safe", comparison(), verification()))
    read = Reader(page_of(tmp_path / "odd", found, verification()))
    assert read.tags <= safe.tags
    assert "alert(1)" in read.text


def test_a_page_with_a_bench_is_drawn_without_torch(tmp_path):
    comparison().save(tmp_path / "bench.json")
    code = (
        "import sys; from prepare.app.job.record import Job, Results; "
        "from prepare.app.report.pages import run_page; from prepare.stages.bench.records import Comparison; "
        f"found = {{'bench': Comparison.load({str(tmp_path / 'bench.json')!r})}}; "
        "run_page(Results(job=Job(None, None, [], {}), found=found)); print('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert json.loads((tmp_path / "bench.json").read_text())["format"] == "prepare.bench"
