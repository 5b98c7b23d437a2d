"""Faults that a change could plant, one in a copy of the sources at a time: the quick tier finds them."""

import os
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor

import pytest

from paths import ROOT

MUTANTS = tomllib.loads((ROOT / "tests/mutants.toml").read_text())["mutant"]
LEAST = 36


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each["file"])
def test_every_mutant_has_its_place(mutant):
    found = (ROOT / "prepare" / mutant["file"]).read_text().count(mutant["old"])
    assert found == 1, f"tests/mutants.toml: the old text is there {found} times: {mutant['old']}"


@pytest.mark.slow
def test_the_quick_tier_finds_the_mutants(tmp_path):
    def survivor(number: int) -> str:
        mutant, copy = MUTANTS[number], tmp_path / str(number)
        for name in ("prepare", "tests", "conf", "hydra_plugins"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "prepare" / mutant["file"]
        path.write_text(path.read_text().replace(mutant["old"], mutant["new"]))
        words = ["-m", "pytest", "-x", "-q", *(f"tests/{each}" for each in mutant["tests"])]
        env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *words], cwd=copy, env=env, capture_output=True)
        shutil.rmtree(copy)
        assert done.returncode in (0, 1), done.stdout.decode() + done.stderr.decode()
        return "" if done.returncode else f"{mutant['file']}: {mutant['new']}"

    with ThreadPoolExecutor(2) as pool:
        survivors = [each for each in pool.map(survivor, range(len(MUTANTS))) if each]
    assert len(MUTANTS) - len(survivors) >= LEAST, "\n".join(survivors)
