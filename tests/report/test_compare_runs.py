"""Comparison of two runs, two audits or two recipes: every difference is listed, and nothing else."""

import shutil
from pathlib import Path

import pytest

import made
from prepare import recipe
from prepare.app.cli import main as cli
from prepare.app.job.record import Record
from prepare.app.report.compare_runs import differences

PLACE = {"format": "prepare.environment", "version": 1, "date": "2025-01-02", "python": "3.11.7", "torch": "2.13.0",
         "packages": {"numpy": "2.0", "hydra-core": None}, "platform": "Linux", "cpu": "a processor", "cores": 2,
         "threads": 1, "devices": [], "git_commit": "abc"}  # fmt: skip


@pytest.fixture
def swept(swept):
    for number in (0, 4):
        Record(swept / f"{number}-row").write_environment(PLACE)
    return swept


@pytest.fixture
def same(swept, tmp_path):
    """Two equal records."""
    return swept / "4-row", Path(shutil.copytree(swept / "4-row", tmp_path / "other"))


def changes(*paths):
    return {name: tuple(sides) for name, *sides in differences(*paths)}


def diff(capsys, *argv):
    code = cli.run(["diff", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_two_jobs_differ_in_words_results_recipe_and_machine(swept):
    assert changes(swept / "0-row", swept / "4-row") == {
        "memfmt": ("contiguous", "channels_last_3d"),
        "precision": ("float32", "bfloat16"),
        "speed": ("no difference", "2.4x faster"),
        "time": ("100 ms", "41.0 ms"),
        "interval": ("1.03x slower to 1.03x faster", "2.37x to 2.51x"),
        "right": ("pass 1e-07 <1%", "pass 0.004 8%"),
        "converted": ("0", "8"),
        "already": ("8", "0"),
        "memory": ("1.0 MiB", "1.0 MiB -> 512.0 KiB"),
        "breaks": ("0", "13"),
        "copied": ("0 bytes", "52.0 KiB"),
        "steps": ("", "half, conv3d_memory_format"),
        "steps.half.dtype": ("", "bfloat16"),
        "steps.conv3d_memory_format.memory_format": ("", "channels_last_3d"),
    }


def test_two_equal_jobs_do_not_differ(same, capsys):
    assert diff(capsys, *same) == (0, "no difference\n", "")


# ------------------------------------------------------------------------------------- audits and recipes


def test_two_audits_differ_tensor_by_tensor(tmp_path, capsys):
    made.audit(names=["a", "b"]).save(tmp_path / "one.json")
    rows = made.audit(names=["b", "c"])
    rows = type(rows)([rows.rows[0]._replace(dtype="bfloat16", stride=(1,)), rows.rows[1]], rows.summary)  # fmt: skip
    rows.save(tmp_path / "other.json")
    paths = tmp_path / "one.json", tmp_path / "other.json"
    assert changes(*paths) == {
        "a.weight": ("present", ""),
        "b.weight": ("stride [216,1,72,24,8]; dtype float32", "stride [1]; dtype bfloat16"),
        "c.weight": ("", "present"),
    }
    code, out, _ = diff(capsys, *paths)
    titles, *rows, last = out.splitlines()
    assert (code, titles.split(), last) == (0, ["item", "A", "B"], "3 differences")
    assert [row.split()[0] for row in rows] == ["a.weight", "b.weight", "c.weight"]


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ({}, {}, {}),
        ({"a": {"x": 1}}, {"a": {"x": 1, "y": None}}, {"steps.a.y": ("", "null")}),
        ({"a": {"x": [1, "é"]}}, {"a": {"x": [1]}}, {"steps.a.x": ('[1,"\\u00e9"]', "[1]")}),
        ({"a": {"x": "1"}}, {"a": {"x": "2"}}, {"steps.a.x": ("1", "2")}),
        ({"a": {}}, {}, {"steps": ("a", ""), "steps.a": ("{}", "")}),
        ({"a": None}, {}, {"steps": ("a", ""), "steps.a": ("null", "")}),
        ({"a": {"x": 1}, "b": {"x": 1}}, {"b": {"x": 1}, "a": {"x": 1}}, {"steps": ("a, b", "b, a")}),
    ],
)  # fmt: skip
def test_two_recipes_differ_option_by_option(tmp_path, first, second, found):
    recipe.save(tmp_path / "one.yaml", first)
    recipe.save(tmp_path / "other.yml", second)
    assert changes(tmp_path / "one.yaml", tmp_path / "other.yml") == found


# ------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("pair", "line"),
    [
        (("4-row", "4-row/audit.json"), "diff: 4-row is the record of a run and 4-row/audit.json is an audit; give two folders of runs, two audit.json or two recipe.yaml"),
        (("4-row/audit.json", "4-row/recipe.yaml"), "diff: 4-row/audit.json is an audit and 4-row/recipe.yaml is a recipe; give two folders"),
        (("4-row", "."), ".: is the folder of a sweep; give the folder of one of its rows"),
        (("4-row", "empty"), "empty: is not the record of a run; give the folder that a run has written"),
        (("4-row", "killed"), "killed: holds no result: its run was killed or is still running; wait for it, "),
        (("4-row/audit.json", "4-row/flow.json"), "4-row/flow.json: this is 'prepare.flow', not a prepare.audit"),
        (("4-row/audit.json", "none.json"), "none.json: cannot be read: No such file or directory"),
        (("4-row", "none"), "none: cannot be read: No such file or directory"),
        (("4-row/recipe.yaml", "broken.yaml"), "broken.yaml:"),
        (("4-row", "0-row"), "0-row/audit.json: this is not an audit: "),
    ],
)  # fmt: skip
def test_incomparable_paths_give_one_line_and_exit_code_2(swept, monkeypatch, capsys, pair, line):
    monkeypatch.chdir(swept)
    Path("empty").mkdir()
    Path("killed/.hydra").mkdir(parents=True)
    Path("broken.yaml").write_text("[")
    Path("0-row/audit.json").write_text("{")
    code, out, err = diff(capsys, *pair)
    assert (code, out) == (2, "")
    assert err.startswith(line)
    assert len(err.splitlines()) == 1
