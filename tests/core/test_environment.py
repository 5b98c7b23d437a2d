"""Tests of the environment of a run: versions, processor and accelerator, with and without torch."""

import json
import os
from pathlib import Path

import pytest
import torch

from prepare.core.utils.machine import environment


def test_the_environment_says_where_it_ran(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["packages"]["hydra-core"]
    assert found["git_commit"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize(
    ("text", "name"), [("x\nmodel name\t: Xeon\nmodel name\t: 2nd\n", "Xeon"), ("", None)]
)
def test_the_environment_names_the_processor(text, name, monkeypatch):
    real = Path.read_text

    def read(path, *args, **options):
        return text if path.name == "cpuinfo" else real(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr("platform.processor", lambda: "")
    assert environment()["cpu"] == name


def test_the_environment_is_found_without_git_on_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.devnull)
    assert environment()["git_commit"] is None
