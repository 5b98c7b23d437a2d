"""A run's folder: what is written is read again, and any other file is refused in one line."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prepare.audit import Audit, audit
from prepare.core.utils.accelerator import (
    NAMES,
    _driver,
    _torch_version_file,
    accelerator,
    installed_accelerator,
)
from prepare.core.utils.environment import environment
from prepare.errors import FileError
from prepare.export.records import Export
from prepare.job.record import STATUSES, Job, Record, Result, files_in
from prepare.pipeline import Pipeline
from whole_records import write_run

ALL_OF_IT = Result("failed", "model", "a line\nand another", "Traceback ...", 1.25)


@pytest.fixture
def record(tmp_path):
    record = Record(tmp_path / "run")
    record.clear()
    return record


def test_a_result_is_read_as_it_was_written(record):
    for result in (Result("ok"), ALL_OF_IT, Result("ok", seconds=0.5, error="\udc80 [red] é\n")):
        record.write_result(result)
        assert record.result() == result


def test_a_result_holds_exactly_the_keys_that_others_may_rely_on(record):
    record.write_result(ALL_OF_IT)
    data = json.loads((record.folder / "result.json").read_text())
    assert list(data) == [
        "format",
        "version",
        "status",
        "reason",
        "error",
        "traceback",
        "seconds",
        "figures",
        "done",
        "during",
        "amp",
    ]
    assert (data["format"], data["version"]) == ("prepare.result", 1)
    assert data["status"] in STATUSES


def test_a_job_is_read_as_it_was_written(record):
    job = Job(
        3, "abc", ["memfmt=by_rank"], {"memfmt": "by_rank", "input": None}, seen={"given": "x"}
    )
    record.write_job(job)
    assert record.job() == job


def test_an_empty_folder_has_neither(record):
    assert (record.result(), record.job()) == (None, None)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", '{"format": "prepare.result"}', '{"format": "prepare.audit", "version": 1}',
        '{"format": "prepare.result", "version": 2, "status": "ok"}', "[" * 100_000,
        '{"format": "prepare.result", "version": 1, "status": "ok", "other": 1}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_result_is_an_error_naming_it(record, text):
    (record.folder / "result.json").write_text(text)
    with pytest.raises(FileError, match=r"result\.json: (this is |version 2)"):
        record.result()


def test_beginning_again_removes_only_files_of_earlier_runs(record):
    for name in (*files_in(record.folder), "mine.txt"):
        (record.folder / name).write_text("x")
    record.clear()
    assert [path.name for path in record.folder.iterdir()] == ["mine.txt"]


def test_beginning_again_removes_an_artefact_of_any_name(record):
    write_run(record.folder)
    names = {"mine.onnx": "", "mine.onnx.data": "", "../outside": "", "": "", "/outside": ""}
    export = Export.load(record.folder / "export.json")
    for name in ("mine.onnx", "mine.onnx.data", "kept.onnx", "../outside"):
        (record.folder / name).write_text("x")
    replace(export, files=names).save(record.folder / "export.json")
    record.clear()
    assert (record.folder.parent / "outside").exists()
    left = {path.name for path in record.folder.iterdir()}
    assert left == {"kept.onnx", "contract.yaml", "doctor.json"}


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError) as caught:
        Record(tmp_path / "file" / "run").clear()
    assert "cannot be used: Not a directory" in str(caught.value)


def test_everything_but_the_environment_is_the_same_in_two_records(tmp_path):
    folders = []
    for name in "ab":
        torch.manual_seed(0)
        model, pipeline = nn.Conv2d(3, 4, 3), Pipeline.from_config({"conv2d_memory_format": {}})
        plan = pipeline.plan(model)
        record = Record(tmp_path / name)
        record.clear()
        record.write_plan(plan)
        record.write_prepared(pipeline, audit(pipeline.apply(model), plan=plan))
        assert Audit.load(record.folder / "audit.json").summary["convolutions"]["converted"] == 1
        folders.append(record.folder)
    for name in ("recipe.yaml", "plan.json", "audit.json", "audit.csv"):
        first, second = ((folder / name).read_bytes() for folder in folders)
        assert first == second
        assert str(tmp_path).encode() not in first


def test_the_environment_says_where_it_ran(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["packages"]["hydra-core"]
    assert found["git_commit"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize(
    ("text", "name", "instructions"),
    [
        (
            "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu smep avx2 amx_bf16\n\nmodel name\t: 2nd\n",
            "Xeon",
            ["amx_bf16", "avx2"],
        ),
        ("processor\t: 0\nFeatures\t: fp asimd bf16 crc32\n", None, ["asimd", "bf16"]),
        (None, None, []),
    ],
    ids=["x86", "ARM", "not Linux"],
)
def test_the_environment_says_which_instructions_the_processor_has(
    text, name, instructions, monkeypatch
):
    as_it_is = Path.read_text

    def read_text(path, **how):
        if path != Path("/proc/cpuinfo"):
            return as_it_is(path, **how)
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr("platform.processor", lambda: "")
    found = environment()
    assert (found["cpu"], found["instructions"]) == (name, instructions)


def test_the_environment_is_found_without_git_on_the_path(monkeypatch):
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
    monkeypatch.setattr("prepare.core.utils.accelerator._driver", lambda: "580.1")
    described = SimpleNamespace(major=8, minor=6, gcnArchName="gfx942:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: described)
    cuda = accelerator()
    assert (cuda["backend"], cuda["cudnn"], cuda["cuda"]) == ("cuda", "9.10.2", "12.8")
    assert (cuda["driver"], cuda["architectures"]) == ("580.1", ["sm_86"])
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3005000)
    rocm = accelerator()
    assert (rocm["backend"], rocm["hip"], rocm["cudnn"]) == ("rocm", "7.0", None)
    assert (rocm["miopen"], rocm["architectures"]) == ("3005000", ["gfx942"])


def test_the_driver_is_read_from_the_kernel_or_nvidia_smi(tmp_path, monkeypatch):
    kernel = tmp_path / "version"
    kernel.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06  Release Build\n")
    monkeypatch.setattr("prepare.core.utils.accelerator._DRIVERS", (tmp_path / "none", kernel))
    assert _driver.__wrapped__() == "580.65.06"
    monkeypatch.setattr("prepare.core.utils.accelerator._DRIVERS", ())
    monkeypatch.setattr("prepare.core.utils.accelerator._smi", lambda query: ("570.1", "570.1"))
    assert _driver.__wrapped__() == "570.1"
    monkeypatch.setattr("prepare.core.utils.accelerator._smi", lambda query: ())
    assert _driver.__wrapped__() is None


def test_the_installed_accelerator_is_known_without_torch(monkeypatch):
    monkeypatch.setattr("prepare.core.utils.accelerator._driver", lambda: "580.1")
    monkeypatch.setattr("prepare.core.utils.accelerator._smi", lambda query: ("9.0", "8.6"))
    monkeypatch.setattr(
        "prepare.core.utils.accelerator._torch_version_file", lambda: {"cuda": "12.8"}
    )
    monkeypatch.setattr("prepare.core.utils.accelerator.version_of", lambda package: "9.10.2.21")
    found = installed_accelerator.__wrapped__()
    assert (found["cuda"], found["cudnn"], found["driver"]) == ("12.8", "9.10.2.21", "580.1")
    assert found["architectures"] == ["sm_86", "sm_90"]
    monkeypatch.undo()
    assert _torch_version_file()["cuda"] == torch.version.cuda
