"""Names that hold anything, odd terminals, and the same bytes in every process."""

import csv
import io
import json
import textwrap
from pathlib import Path

import pytest

from prepare.app.cli import main as cli
from prepare.audit import Audit
from prepare.pipeline import Pipeline
from prepare.recipe import load
from run_faults import CHOSEN, NETS, SMALL, WRITTEN, all_whole, finish, start, status, told

ODD = ["model._target_=nets.odd", "input.shape=[1,3,4,4]", *CHOSEN]


LEAVES_OUT = 'steps.conv2d_memory_format.exclude=["*red*", "*1[+]1", "*new?line", "*xxxxxxxxx*"]'


def odd_names() -> list[str]:
    found: dict = {}
    exec(textwrap.dedent(NETS), found)
    return found["NAMES"]


def check_odd_record(where: Path) -> None:
    names = sorted(odd_names())
    assert set(all_whole(where)) == set(WRITTEN)
    found = Audit.load(where / "audit.json")
    assert [row.module for row in found.rows if row.tensor == "weight"] == names
    # Half a pair of surrogates cannot stand in UTF-8, which is all that readers of CSV take.
    shown = [name.encode("utf-8", "backslashreplace").decode() for name in names]
    table = csv.DictReader(io.StringIO((where / "audit.csv").read_bytes().decode(), newline=""))
    assert [row["module"] for row in table if row["tensor"] == "weight"] == shown
    plan = json.loads((where / "plan.json").read_text())
    assert {row["module"] for row in plan["tensors"]} == set(names)
    again = where / "again.json"
    found.save(again)
    assert again.read_bytes() == (where / "audit.json").read_bytes()
    again.unlink()


def test_names_that_hold_anything_go_through_the_whole_command_line(folder, capsys):
    assert cli.run([*ODD, LEAVES_OUT, "hydra.run.dir=run"]) == 0
    out, err = capsys.readouterr()
    assert told(err) == []
    assert "[red]x[/red].weight" in (folder / "run" / "report.html").read_text()
    assert all(line.isprintable() for line in out.splitlines())
    check_odd_record(folder / "run")
    skipped = {
        row.module
        for row in Audit.load(folder / "run" / "audit.json").rows
        if row.status == "skipped"
    }
    assert skipped == {"[red]x[/red]", "=1+1", "new\nline", "x" * 5000}
    steps = load(folder / "run" / "recipe.yaml")
    assert Pipeline.from_config(steps).to_config() == steps


def test_an_error_in_a_module_with_an_odd_name_is_one_line(folder, capsys):
    assert cli.run([*ODD, "model._target_=nets.broken", "hydra.run.dir=run"][1:]) == 1
    (line,) = [row for row in told(capsys.readouterr().err) if "traceback" not in row]
    assert line.isprintable()
    assert "[bold]\\n\\udc80" in line
    assert status(folder / "run") == "failed"
    assert json.loads((folder / "run" / "result.json").read_text())["reason"] == "model"


@pytest.mark.slow
def test_a_recipe_gives_the_same_bytes_in_every_process(folder):
    words = [*SMALL, "precision=bfloat16", "steps.half.keep=[norms,'type:BatchNorm2d']"]
    words.append("verify=none")
    alone = start(
        *words, "hydra.run.dir=alone", cwd=folder, PYTHONHASHSEED="2", OMP_NUM_THREADS="2"
    )
    assert cli.run(["--multirun", *words, "seed=3,0", "hydra.sweep.dir=sweep"]) == 0
    assert finish(alone)[0] == 0
    (row,) = (folder / "sweep").glob("1-*")
    for name in ("audit.json", "audit.csv", "plan.json", "recipe.yaml"):
        assert (row / name).read_bytes() == (folder / "alone" / name).read_bytes(), name
