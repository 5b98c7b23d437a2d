"""Tests of the environment of a run: versions, processor and accelerator, with and without torch."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prepare.core.utils.machine import NAMES, accelerator, driver, environment


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
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    monkeypatch.setattr("platform.processor", lambda: "")
    assert environment()["cpu"] == name


def test_the_environment_is_found_without_git_on_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.devnull)
    assert environment()["git_commit"] is None


def test_the_environment_holds_the_libraries_of_the_accelerator(monkeypatch):
    found = environment()["accelerator"]
    assert list(found) == list(NAMES)
    assert found["backend"] in ("cuda", "rocm", "mps", "xpu", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "one")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr("prepare.core.utils.machine.driver", lambda: "580.1")
    described = SimpleNamespace(major=8, minor=6, gcnArchName="gfx942:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: described)
    cuda = accelerator()
    assert (cuda["backend"], cuda["cudnn"], cuda["cuda"]) == ("cuda", "9.10.2", "12.8")
    assert (cuda["driver"], cuda["architectures"]) == ("580.1", ["sm_86"])
    monkeypatch.setattr(torch.version, "hip", "7.0")
    rocm = accelerator()
    assert (rocm["backend"], rocm["hip"], rocm["cudnn"]) == ("rocm", "7.0", None)
    assert rocm["architectures"] == ["gfx942"]


def test_the_driver_is_read_from_the_kernel(tmp_path, monkeypatch):
    kernel = tmp_path / "version"
    kernel.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06  Release Build\n")
    monkeypatch.setattr("prepare.core.utils.machine._DRIVERS", (tmp_path / "none", kernel))
    assert driver() == "580.65.06"
    kernel.unlink()
    assert driver() is None


def test_other_programs_are_asked_once_a_process(tmp_path, monkeypatch):
    asked, real = [], subprocess.run
    monkeypatch.chdir(tmp_path)

    def run(command, *more, **how):
        asked.append(command[0])
        return real(command, *more, **how)

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(3):
        environment()
    assert asked.count("git") == 1
