"""Comparison of two runs, two audits or two recipes: every difference is listed, and nothing else."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

import made
from browser import browser, opened
from page_reader import HOSTILE, Reader
from prepare import recipe
from prepare.app.cli import main as cli
from prepare.app.job.record import Job, Record, Result
from prepare.app.report.compare_runs import read_differences
from prepare.app.report.pages.page import diff_page

PLACE = {"format": "prepare.environment", "version": 1, "date": "2025-01-02", "python": "3.11.7", "torch": "2.13.0",
         "packages": {"numpy": "2.0", "hydra-core": None}, "platform": "Linux", "cpu": "a processor", "cores": 2,
         "threads": 1, "devices": [], "git_commit": "abc"}  # fmt: skip


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    folder = made.formats_by_precisions(tmp_path_factory.mktemp("made") / "swept")
    for number in (0, 4):
        Record(folder / f"{number}-row").write_environment(PLACE)
    return folder


@pytest.fixture
def swept(made_once, tmp_path):
    return Path(shutil.copytree(made_once, tmp_path / "swept"))


@pytest.fixture
def same(swept, tmp_path):
    """Two equal records."""
    return swept / "4-row", Path(shutil.copytree(swept / "4-row", tmp_path / "other"))


def changes(*paths):
    return {part.title: [str(change) for change in part.changes] for part in read_differences(*paths).parts}  # fmt: skip


def change(path, **keys):
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def diff(capsys, *argv):
    code = cli.run(["diff", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_two_jobs_differ_in_recipe_command_results_and_machine(swept):
    assert changes(swept / "0-row", swept / "4-row") == {
        "recipe": [
            'steps.half: absent -> {"dtype":"bfloat16"}',
            'steps.conv3d_memory_format: absent -> {"memory_format":"channels_last_3d"}',
        ],
        "command line": ["memfmt: contiguous -> channels_last_3d", "precision: float32 -> bfloat16"],
        "results": [
            "convolutions: 0 converted, 8 already, 0 skipped, 0 ineffective -> 8 converted, 0 already, 0 skipped, 0 ineffective",
            "memory of the tensors: 1.0 MiB before, 1.0 MiB after -> 1.0 MiB before, 512.0 KiB after",
            "layout lost: 0 times -> 13 times",
            "copied for layouts: 0 bytes -> 52.0 KiB",
            "right: pass 1e-07 (<1 % of the tolerance) -> pass 0.004 (8 % of the tolerance)",
            "time of one inference: no difference, 100 ms (95 % interval: 1.03x slower to 1.03x faster) -> 2.4x faster, 41.0 instead of 100 ms (95 % interval: 2.37x to 2.51x)",
        ],
    }  # fmt: skip


def test_two_equal_jobs_do_not_differ(same, capsys):
    assert diff(capsys, *same) == (0, "no difference\n", "")
    assert "The two runs do not differ" in Reader(diff_page(read_differences(*same))).text


def test_date_and_duration_of_a_job_are_not_compared(same):
    change(same[1] / "environment.json", date="2026-01-01")
    change(same[1] / "result.json", seconds=99.0)
    assert changes(*same) == {}


def test_two_machines_differ_in_their_environment(same):
    place = {"torch": "2.14.0", "packages": {"numpy": "2.1", "hydra-core": "1.3"}, "devices": ["a GPU"]}  # fmt: skip
    change(same[1] / "environment.json", **place)
    assert changes(*same) == {
        "environment": [
            "torch: 2.13.0 -> 2.14.0",
            "packages.numpy: 2.0 -> 2.1",
            'devices: absent -> ["a GPU"]',
            "packages.hydra-core: absent -> 1.3",
        ]
    }


def test_times_with_overlapping_intervals_get_a_note(same):
    made.bench(0.42).save(same[1] / "bench.json")
    made.give_figures(same[1])
    (line,) = changes(*same)["results"]
    assert line == "time of one inference: 2.4x faster, 41.0 instead of 100 ms (95 % interval: 2.37x to 2.51x) -> 2.4x faster, 42.0 instead of 100 ms (95 % interval: 2.31x to 2.45x); unclear which is faster, the intervals overlap"  # fmt: skip
    made.bench(0.9).save(same[1] / "bench.json")
    made.give_figures(same[1])
    assert "overlap" not in changes(*same)["results"][0]


def test_reasons_that_differ_only_in_figures_are_the_same(same):
    row = "calls take about {} s (unprepared), and 3 rounds do not fit into {} s"
    for folder, figures in zip(same, [(1.8, 17), (2.1, 9.5)], strict=True):
        made.bench(error=row.format(*figures)).save(folder / "bench.json")
        made.give_figures(folder)
    assert changes(*same) == {}
    figures = {change.name: change for change in read_differences(*same).figures}
    assert "1.8 s" in figures["time of one inference"].first
    assert "2.1 s" in figures["time of one inference"].second
    text = Reader(diff_page(read_differences(*same))).text
    assert "differs" not in text


def test_files_of_only_one_job_are_differences(same):
    for name in ("bench.json", "verify.json", "flow.json", "audit.json", "environment.json", "job.json"):  # fmt: skip
        (same[1] / name).unlink()
    made.give_figures(same[1])
    found = changes(*same)
    assert found["audit"] == ["conv.weight: only in ours"]
    assert "right: pass 0.004 (8 % of the tolerance) -> absent" in found["results"]
    assert (
        "time of one inference: 2.4x faster, 41.0 instead of 100 ms (95 % interval: 2.37x to 2.51x) -> absent"
        in found["results"]
    )
    assert "torch: 2.13.0 -> absent" in found["environment"]
    assert "model: unet3d -> absent" in found["command line"]


def test_a_failed_job_differs_by_its_error(same):
    Record(same[1]).write_result(Result("failed", "oom", "out of memory"))
    found = changes(*same)["results"]
    assert found[0] == "status: ok -> failed"
    assert "error: absent -> out of memory" in found
    (same[1] / "result.json").unlink()
    assert changes(*same)["results"][0] == "status: ok -> not finished"


def test_group_choices_are_compared_and_folders_are_not(same):
    Record(same[1]).write_job(Job(4, "one", ["model=unet3d", "memfmt=channels_last_3d", "precision=bfloat16", "hydra.run.dir=x"], {"device": "auto", "input": None}))  # fmt: skip
    assert changes(*same) == {"command line": ["device: absent -> auto"]}


# ------------------------------------------------------------------------------------- audits and recipes


def test_two_audits_differ_tensor_by_tensor(tmp_path, capsys):
    made.audit(names=["a", "b"]).save(tmp_path / "one.json")
    rows = made.audit(names=["b", "c"])
    rows = type(rows)([rows.rows[0]._replace(dtype="bfloat16", stride=(1,)), rows.rows[1]], rows.summary)  # fmt: skip
    rows.save(tmp_path / "other.json")
    code, out, _ = diff(capsys, tmp_path / "one.json", tmp_path / "other.json")
    assert code == 0
    assert out.splitlines() == [
        "a.weight: only in ours",
        "b.weight: stride [216,1,72,24,8] -> [1], dtype float32 -> bfloat16",
        "c.weight: only in theirs",
        "3 differences",
    ]


@pytest.mark.parametrize(
    ("first", "second", "lines"),
    [
        ({}, {}, []),
        ({"a": {"x": 1}}, {"a": {"x": 1, "y": None}}, ["steps.a.y: absent -> null"]),
        ({"a": {"x": [1, "é"]}}, {"a": {"x": [1]}}, ['steps.a.x: [1,"\\u00e9"] -> [1]']),
        ({"a": {"x": "1"}}, {"a": {"x": "2"}}, ["steps.a.x: 1 -> 2"]),
        ({"a": {}}, {}, ["steps.a: {} -> absent"]),
        ({"a": None}, {}, ["steps.a: dropped -> absent"]),
        ({"a": None}, {"a": {"x": 1}}, ['steps.a: dropped -> {"x":1}']),
        ({"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1}}, {"b": {"x": 1}, "a": {"x": 1}}, ['steps.c: {"x":1} -> absent', "the order of the steps: a, b -> b, a"]),
    ],
)  # fmt: skip
def test_two_recipes_differ_option_by_option(tmp_path, first, second, lines):
    recipe.save(tmp_path / "one.yaml", first)
    recipe.save(tmp_path / "other.yml", second)
    assert changes(tmp_path / "one.yaml", tmp_path / "other.yml").get("recipe", []) == lines


def test_equal_options_in_other_notation_do_not_differ(tmp_path):
    (tmp_path / "one.yaml").write_text(
        "format: prepare.recipe\nversion: 1\nsteps: {half: {dtype: bfloat16}}\n"
    )
    recipe.save(tmp_path / "other.yaml", {"half": {"dtype": "bfloat16"}})
    assert changes(tmp_path / "one.yaml", tmp_path / "other.yaml") == {}


# ------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("pair", "line"),
    [
        (("4-row", "4-row/audit.json"), "diff: 4-row is the record of a run and 4-row/audit.json is an audit; give two folders of runs, two audit.json or two recipe.yaml"),
        (("4-row/audit.json", "4-row/recipe.yaml"), "diff: 4-row/audit.json is an audit and 4-row/recipe.yaml is a recipe; give two folders"),
        (("4-row", "."), ".: is the folder of a sweep; give the folder of one of its rows"),
        (("4-row", "empty"), "empty: is not the record of a run; give the folder that a run has written"),
        (("4-row", "killed"), "killed: holds no result: its run was killed or is still running; wait for it, "),
        (("4-row/audit.json", "4-row/flow.json"), "4-row/flow.json: this is a prepare.flow, not a prepare.audit"),
        (("4-row/audit.json", "none.json"), "none.json: cannot be read: No such file or directory"),
        (("4-row/recipe.yaml", "none.yaml"), "none.yaml: cannot be read: No such file or directory"),
        (("4-row/recipe.yaml", "broken.yaml"), "broken.yaml:"),
        (("4-row", "0-row"), "0-row: flow.json: this is not a flow: "),
    ],
)  # fmt: skip
def test_incomparable_paths_give_one_line_and_exit_code_2(swept, monkeypatch, capsys, pair, line):
    monkeypatch.chdir(swept)
    Path("empty").mkdir()
    Path("killed/.hydra").mkdir(parents=True)
    Path("broken.yaml").write_text("[")
    Path("0-row/flow.json").write_text("{")
    code, out, err = diff(capsys, *pair)
    assert (code, out) == (2, "")
    assert err.startswith(line)
    assert len(err.splitlines()) == 1


def test_an_unwritable_page_gives_one_line_after_the_text(same, tmp_path, capsys):
    code, out, err = diff(capsys, *same, "--page", tmp_path / "none" / "x.html")
    assert (code, out) == (1, "no difference\n")
    assert len(err.splitlines()) == 1


# ------------------------------------------------------------------------------------- the gist


def test_the_gist_of_two_jobs_is_the_first_line_and_the_title(swept, capsys):
    gist = "layout lost 0 -> 13 times, 0 bytes -> 52.0 KiB copied; 2.4x faster; memory 1.0 MiB -> 512.0 KiB"
    _, out, _ = diff(capsys, swept / "0-row", swept / "4-row")
    assert out.splitlines()[0] == gist
    differences = read_differences(swept / "0-row", swept / "4-row")
    assert f"<h1>{gist.replace('->', '→')}</h1>" in diff_page(differences)


def test_equal_changes_of_tensors_are_one_line_without_all(tmp_path, capsys):
    names = [f"block.{n}" for n in range(21)]
    one = made.audit(names=names)
    one = type(one)([row._replace(type="InstanceNorm2d") for row in one.rows], one.summary)
    other = type(one)([row._replace(type="KeepingInstanceNorm2d") for row in one.rows], one.summary)
    one.save(tmp_path / "one.json")
    other.save(tmp_path / "other.json")
    paths = (tmp_path / "one.json", tmp_path / "other.json")
    assert diff(capsys, *paths)[1].splitlines() == [
        "21 InstanceNorm2d -> KeepingInstanceNorm2d (repaired: keeps the layout); 21 tensors",
        "21 differences; --all prints each tensor",
    ]
    lines = diff(capsys, *paths, "--all")[1].splitlines()
    assert lines[0] == "block.0.weight: type InstanceNorm2d -> KeepingInstanceNorm2d"
    assert (len(lines), lines[-1]) == (22, "21 differences")
    text = Reader(diff_page(read_differences(*paths))).text
    assert "Each tensor: 21 differences" in text


# ------------------------------------------------------------------------------------- the page


def test_the_page_has_both_sides_and_every_difference(swept, tmp_path, capsys):
    code, out, _ = diff(capsys, swept / "0-row", swept / "4-row", f"--page={tmp_path / 'x.html'}")
    assert code == 0
    assert out.splitlines()[-2:] == ["10 differences", f"the page is in {tmp_path / 'x.html'}"]
    found = Reader((tmp_path / "x.html").read_text())
    for phrase in (
        "10 differences",
        "comparison of two runs",
        f"A {swept / '0-row'}",
        "Recipe: 2 differences",
        "status ok ok same",
        "layout lost 0 times 13 times differs",
        'steps.half {"dtype":"bfloat16"} only in B',
        "memfmt contiguous channels_last_3d differs",
    ):
        assert phrase in found.text, phrase
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch("h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_two_audits_have_a_page(tmp_path):
    made.audit(names=["a", *HOSTILE]).save(tmp_path / "one.json")
    made.audit(names=["b"]).save(tmp_path / "other.json")
    text = diff_page(read_differences(tmp_path / "one.json", tmp_path / "other.json"))
    text.encode("utf-8")
    found = Reader(text)
    assert found.text.count("only in A") == len(HOSTILE) + 2  # and their group
    assert len(found.all("script")) == 1
    assert not found.tags & {"img", "link"}
    assert "alert(1)" in found.text


def test_hostile_names_are_one_line_each_in_the_terminal(tmp_path, capsys):
    made.audit(names=HOSTILE).save(tmp_path / "one.json")
    made.audit(names=[]).save(tmp_path / "other.json")
    _, out, _ = diff(capsys, "--all", tmp_path / "one.json", tmp_path / "other.json")
    assert len(out.splitlines()) == len(HOSTILE) + 1
    assert out.replace("\n", "").isprintable()


class TestInABrowser:
    pytestmark = browser

    @pytest.mark.parametrize("width", [390, 1200])
    def test_the_page_opens_without_errors_and_fits(self, swept, tmp_path, width):
        text = diff_page(read_differences(swept / "0-row", swept / "4-row"))
        measured, console = opened(text, tmp_path, width=width)
        assert console == []
        assert measured["wide"] == measured["room"] <= width
