"""Runs whose files cannot be written: a full disk, a failing call, an interrupt at a write."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from prepare.app.cli import main as cli
from prepare.app.job import record
from prepare.audit import audit
from prepare.core.utils import files
from prepare.errors import FileError
from prepare.pipeline import Pipeline
from run_faults import SMALL, WRITTEN, all_whole, status, told
from small_nets import same, small_2d

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Failing:
    """Makes one call of the system's file calls fail, or that and every later one."""

    def __init__(
        self, patch: pytest.MonkeyPatch, n: int, *, calls: tuple, error: BaseException, after: bool
    ):
        self.left, self.error, self.after, self.failed = n, error, after, 0
        # What `files` sees, and nothing else: Hydra and pytest write too.
        system = type("System", (), {"__getattr__": lambda _, name: getattr(os, name)})()
        for name in calls:
            setattr(system, name, self.wrapped(getattr(os, name)))
        patch.setattr(files, "os", system)

    def wrapped(self, real):
        def call(*arguments, **options):
            self.left -= 1
            if self.left == 0 or (self.after and self.left < 0):
                self.failed += 1
                if real is os.close:
                    real(*arguments)
                raise self.error
            return real(*arguments, **options)

        return call


def run_that_fails(n: int, folder: Path, capsys, **how) -> tuple[int, Failing, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        fault = Failing(patch, n, **how)
        code = cli.run([*SMALL, f"hydra.run.dir={folder}"])
    return code, fault, told(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("after", "step"),
    [pytest.param(False, 1, marks=pytest.mark.slow, id="only that one"),
     pytest.param(True, 1, marks=pytest.mark.slow, id="all from then on"),
     pytest.param(True, 4, id="some")],
)  # fmt: skip
def test_a_disk_that_is_full_at_write_number_n_is_one_line_and_exit_1(folder, capsys, after, step):
    found = []
    for n in range(1, 50, step):
        where = folder / f"run{n}"
        code, fault, err = run_that_fails(
            n, where, capsys, calls=("replace",), error=FULL, after=after
        )
        names = all_whole(where)
        if not fault.failed:
            break
        assert (code, len(err)) == (1, 1)
        assert err[0].endswith(
            "cannot be written: No space left on device; free some space or choose another folder"
        )
        found.append(err[0].split(":")[0].split("/")[-1])
        # What was written before stays: one file more with every turn.
        assert len(names) == (n - 1 if after else min(n, len(WRITTEN)))
        if "result.json" in names:
            assert status(where) == "failed"
            assert json.loads((where / "result.json").read_text())["reason"] == "file"
    assert code == 0
    assert set(names) == set(WRITTEN) < set(record.files_in())
    # Everything that a run writes has failed once.
    assert set(found) == set(WRITTEN) if step == 1 else len(set(found)) > 2


def test_a_model_stays_usable_if_its_files_cannot_be_saved(tmp_path):
    model, reference = small_2d().eval(), small_2d().eval()
    reference.load_state_dict(model.state_dict())
    pipeline = Pipeline.from_config({"half": {"dtype": "bfloat16"}, "conv2d_memory_format": {}})
    plan = pipeline.plan(model)
    pipeline.apply(model)
    pipeline.apply(reference)
    (tmp_path / "file").touch()
    for act in (pipeline.save, audit(model, plan=plan).save):
        for path in (tmp_path / "file" / "x", tmp_path / "absent" / "x", tmp_path):
            with pytest.raises(FileError):
                act(path)
        for n in (1, 2):
            with pytest.MonkeyPatch.context() as patch:
                Failing(
                    patch,
                    n,
                    calls=("open", "write", "fsync", "close", "replace"),
                    error=FULL,
                    after=True,
                )
                with pytest.raises(FileError, match="No space left on device"):
                    act(tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    same(model, reference)
    assert not pipeline.plan(model)
    assert torch.isfinite(model(torch.randn(1, 3, 8, 8, dtype=torch.bfloat16))).all()
    pipeline.save(tmp_path / "recipe.yaml")
    assert not Pipeline.load(tmp_path / "recipe.yaml").plan(model)
