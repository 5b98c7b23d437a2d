"""The record of a bench: saved, loaded, refused, shown."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clocks import Clock, noisy
from prepare.bench import Comparison, compare
from prepare.bench.document import _control
from prepare.core.utils.numbers import seconds
from prepare.errors import BenchError

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
    (case,) = data["cases"]
    assert case["what"] == "inference"
    assert case["comparison"]["environment"]["threads"] == torch.get_num_threads()
    known = {"threads", "cores_available", "load_before", "others", "stolen", "held_back", "seed"}
    assert known <= case["comparison"]["settings"].keys()


def COMPARED(change):
    """The same file with something else in its comparison."""
    return lambda data: {
        "cases": [case | {"comparison": case["comparison"] | change} for case in data["cases"]]
    }


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"format": "prepare.flow"}, "this is a prepare.flow, not a prepare.bench"),
        ({"version": 2}, "version 2 is not known here; this prepare reads version 1"),
        ({"cases": []}, "this is not a bench: ValueError: it has no cases"),
        ({"cases": [{"what": "a"}]}, "this is not a bench: ValueError: the keys are ['what']"),
        ({"cases": None}, "this is not a bench: TypeError"),
        (
            COMPARED({"rows": [{"name": "a"}]}),
            "this is not a bench: ValueError: the keys are ['name']",
        ),
        (COMPARED({"rows": None}), "this is not a bench: TypeError"),
        (COMPARED({"aa": {}}), "this is not a bench: ValueError: the keys are []"),
    ],
)
def test_a_file_that_is_not_a_bench_is_refused_with_the_reason(found, tmp_path, change, wrong):
    path = tmp_path / "bench.json"
    found.save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | (change(data) if callable(change) else change)))
    with pytest.raises(BenchError) as raised:
        Comparison.load(path)
    assert str(raised.value).startswith(f"{path}: {wrong}")
    path.write_text(path.read_text().replace('"faster"', '"best"')[:-3])
    with pytest.raises(BenchError, match="this is not a bench"):
        Comparison.load(path)


def test_an_unknown_verdict_is_refused(found, tmp_path):
    path = tmp_path / "bench.json"
    found.save(path)
    path.write_text(path.read_text().replace('"faster"', '"best"'))
    with pytest.raises(BenchError, match="'best' is not a verdict"):
        Comparison.load(path)


def test_the_control_names_the_ratio_and_the_noise(found):
    assert re.fullmatch(
        r"; the baseline against itself: differences below \d+\.\d % are noise",
        _control(found.aa),
    )


def test_a_failed_baseline_has_no_control():
    clock = Clock()
    broken = {"a": clock.takes(0.1, breaks_at=0), "b": clock.takes(0.1)}
    comparison = compare(broken, BATCH, train=False, _clock=clock)
    assert _control(comparison.aa) == "; the baseline failed, so nothing was compared"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (123.4, "123 s"),
        (1.234, "1.23 s"),
        (0.9999, "1.00 s"),
        (0.0456, "45.6 ms"),
        (2e-6, "2.00 us"),
    ],
)
def test_times_are_shown_with_three_digits(value, text):
    assert seconds(value) == text


def test_a_saved_bench_is_read_and_described_without_torch(found, tmp_path):
    found.save(tmp_path / "bench.json")
    code = (
        "import sys; from prepare.bench.records import Case, Comparison; "
        "from prepare.bench.document import case_sentence; "
        f"comparison = Comparison.load({str(tmp_path / 'bench.json')!r}); "
        "print(case_sentence(Case(what='inference', comparison=comparison)), 'torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stderr == ""
    assert re.fullmatch(r"inference: 2\.0x faster \(50 % less time, .*\): .* False\n", done.stdout)
