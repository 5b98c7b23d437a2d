"""Folders of somebody else: nothing is written outside of them, and nothing waits."""

import os

import pytest
from torch import nn

import made
from made import NET, tuning, write_run
from prepare import checkpoint
from prepare.app.cli import main as cli
from prepare.app.job.record import Record, files_in, leads_out
from prepare.app.report.pages.page import write_page
from prepare.stages.tune.cache import Cache
from run_faults import posix, told

pytestmark = posix
RUN = [*NET, "bench=none", "flow=none"]


@pytest.fixture
def outside(tmp_path):
    """A file of the user, which stays as it is."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").write_text("mine")
    yield tmp_path / "outside"
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["mine"]
    assert (tmp_path / "outside" / "mine").read_text() == "mine"


def test_every_writer_replaces_a_link_and_writes_nothing_outside(tmp_path, outside):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        write_run(folder)
    names = [
        *files_in(),
        "w.safetensors",
        "w.safetensors.json",
        "tune",
    ]
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in names:
        (linked / name).symlink_to(outside / "mine")
    checkpoint.save(nn.Linear(2, 2), linked / "w.safetensors")
    cache, tuned = Cache(str(linked)), tuning()
    cache._path(tuned.conditions).symlink_to(outside / "mine")
    cache.store(tuned)
    assert cache.find(tuned.conditions, budget=1.0) == tuned
    Record(linked).clear()
    for name in files_in():
        (linked / name).symlink_to(outside / "mine")
    write_run(linked)
    for name in files_in():
        if not (linked / name).exists():
            (linked / name).symlink_to(outside / "mine")
    write_page(linked)
    assert not (linked / "report.html").is_symlink()


@pytest.mark.parametrize("name", [".hydra", ".hydra/config.yaml", "prepare.log"])
def test_a_run_does_not_begin_where_hydra_would_follow_a_link(
    tmp_path, outside, monkeypatch, capsys, name
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.symlink_to(outside if name == ".hydra" else outside / "mine")
    assert cli.run([*RUN, "hydra.run.dir=run", "overwrite=true"]) == 2
    line = f"hydra.run.dir: the folder holds a link out of it: {name}; remove it, or choose another"
    assert told(capsys.readouterr().err) == [line]


def test_a_run_does_not_wait_for_a_pipe_in_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "prepare.log")
    assert cli.run([*RUN, "hydra.run.dir=run"]) == 2
    assert "file: prepare.log" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["0", ".locks", "multirun.yaml", "0/.hydra", "0/.hydra/hydra.yaml"]
)
def test_a_sweep_does_not_begin_where_a_link_leads_out(
    tmp_path, outside, monkeypatch, capsys, name
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "swept" / name
    path.parent.mkdir(parents=True)
    path.symlink_to(outside / "mine" if "yaml" in name else outside)
    words = [
        "-m",
        *RUN,
        "seed=1,2",
        "hydra.sweep.dir=swept",
        "hydra.sweep.subdir=${hydra.job.num}",
        "overwrite=true",
    ]
    assert cli.run(words) == 2
    line = (
        f"hydra.sweep.dir: the folder holds a link out of it: {name}; remove it, or choose another"
    )
    assert told(capsys.readouterr().err) == [line]


@pytest.mark.parametrize(
    "words", [[*RUN, "weights=pipe"], ["diff", "pipe.yaml", "pipe.yaml"], ["diff", "pipe", "pipe"]]
)
def test_a_pipe_given_as_weights_or_recipe_is_refused_at_once(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkfifo("pipe.yaml")
    assert cli.run(words) == 2
    (line,) = told(capsys.readouterr().err)
    assert "regular file" in line


def test_a_summary_and_a_page_do_not_wait_for_a_pipe(tmp_path, capsys):
    swept = made.formats_by_precisions(tmp_path / "swept")
    for name in ("audit.json", "result.json", "job.json", "flow.json", "recipe.yaml"):
        (swept / "4-row" / name).unlink()
        os.mkfifo(swept / "4-row" / name)
    os.mkfifo(swept / ".locks")
    cli.run(["summary", str(swept)])
    assert "4  " in capsys.readouterr().out
    assert write_page(swept / "4-row").is_file()


def test_a_huge_record_is_refused_without_being_read(tmp_path):
    write_run(tmp_path / "run")
    os.truncate(tmp_path / "run" / "audit.json", 1 << 40)
    assert "audit.json: is larger than" in str(write_page(tmp_path / "run").read_text())


def test_a_lease_that_is_removed_meanwhile_is_no_foreign_file(tmp_path, monkeypatch):
    (lease := tmp_path / ".locks" / "manifest.lease").parent.mkdir()
    lease.touch()
    real = os.path.realpath

    def realpath(path, **options):
        if path == lease:
            lease.unlink()
        return real(path, **options)

    monkeypatch.setattr(os.path, "realpath", realpath)
    assert leads_out(tmp_path, "hydra.sweep.dir", sweep=True) == []
    assert not lease.exists()
