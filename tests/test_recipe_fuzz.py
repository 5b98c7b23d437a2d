"""Any bytes as a recipe: refused, or the same after a round trip."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "support" / "fuzz_recipe.py"


def fuzz(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(FUZZ), *arguments], capture_output=True, text=True, check=False,
        cwd=FUZZ.parents[2], env={**os.environ, "PYTHONPATH": str(FUZZ.parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def right(result: dict, cases: int) -> None:
    sys.stdout.write(f"{result}\n")  # `pytest -rP` shows it
    assert result["cases"] >= cases
    assert result["accepted"] > 0.1 * cases
    assert result["refused"] > 0.1 * cases
    assert result["extra_mb"] < 200
    assert result["extra_mb"] > 0 or sys.platform != "linux"  # else it measured nothing


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        (1200, "--seed 1 --big 10"),
        (150, "--seed 2 --big 20 --slow-parser"),
        pytest.param(100_000, "--seed 3", marks=pytest.mark.slow),
        pytest.param(10_000, "--seed 4 --slow-parser", marks=pytest.mark.slow),
    ],
)
def test_any_bytes_are_refused_or_round_trip(cases, words):
    right(fuzz("--cases", str(cases), *words.split()), cases)
