"""Records with wrong values: each reader shows them, or says in one line what is wrong; none raises."""

import io
import random
import shutil
import traceback
from collections import Counter
from pathlib import Path

import pytest

import made
from made import write_run
from mutations import Mutation, mutations
from prepare import recipe
from prepare.app.cli.commands import show_sweep
from prepare.app.job.record import read_results, used_folder
from prepare.app.report.compare_runs import differences
from prepare.app.sweep.manifest import read_sweep_manifest
from prepare.app.sweep.summary import read_summary
from prepare.audit import Audit
from prepare.core.utils.text import output_to
from prepare.errors import PrepareError
from prepare.stages.bench.records import Comparison
from prepare.stages.flow.records import Flow
from prepare.stages.tune.records import Tuning
from prepare.stages.verify.records import Verification

LOADERS = {
    "audit.json": Audit.load, "flow.json": Flow.load, "verify.json": Verification.load, "bench.json": Comparison.load,
    "tune.json": Tuning.load,
    "recipe.yaml": recipe.load,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    write_run(folder)
    return folder


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    return made.formats_by_precisions(tmp_path_factory.mktemp("sweep") / "swept")


def read_run(folder: Path, file: str, sound: Path, *, pages: bool) -> list:
    """Return the calls of everything that reads this file; without `pages` no difference."""

    calls = [lambda: read_results(folder), lambda: used_folder(folder)]
    if pages:
        calls += [lambda: differences(folder, sound), lambda: differences(sound, folder)]
    if file in LOADERS:
        calls.append(lambda: show(LOADERS[file](folder / file), sound / file, page=pages))
    return calls


def show(record, sound: Path, *, page: bool) -> None:
    """Show a record in each way that its class has."""
    repr(record), str(record)
    if isinstance(record, Audit):
        record.diff(Audit.load(sound))
        record.to_csv()
    if isinstance(record, Tuning):
        assert record.recipe is not None
    if isinstance(record, Comparison):
        assert record.headline


def read_sweep(folder: Path, file: str, statuses: list[str], *, pages: bool) -> list:
    def summary() -> None:
        rows = read_summary(folder).rows
        if file != "sweep.json":
            # No other row is lost, except that the number in a job.json may be another row's.
            found = [row.status for row in rows]
            assert len(
                [1 for a, b in zip(found, statuses, strict=True) if a != b]
            ) <= 1 + file.endswith("job.json"), found
        if pages:
            show_sweep(folder)

    return [summary, lambda: read_sweep_manifest(folder)]


def raw_errors(folder: Path, chosen: list[Mutation], readers, every: int) -> Counter:
    """Apply each mutation in turn; return the exceptions that are not ours, by type and place.

    Draw the pages of one in `every`.
    """
    found: Counter = Counter()
    for number, mutation in enumerate(chosen):
        path = folder / mutation.file
        before = path.read_bytes()
        path.write_text(mutation.text())
        for call in readers(mutation.file, pages=number % every == 0):
            try:
                with output_to(io.StringIO()):
                    call()
            except PrepareError as error:
                assert str(error).isprintable()
                assert len(str(error)) < 2000
            except Exception as error:
                frames = [
                    f
                    for f in traceback.extract_tb(error.__traceback__)
                    if "/prepare/" in f.filename
                ]
                place = (
                    f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "here"
                )
                found[
                    f"{place}: {type(error).__name__}: {str(error)[:80]}: {mutation.file}: {mutation.what}"
                ] += 1
        path.write_bytes(before)
    return found


def check(tmp_path: Path, run: Path, swept: Path, count: int, *, every: int = 1) -> None:
    """Check `count` mutations chosen at random from each folder."""
    rng = random.Random(23)
    statuses = [row.status for row in read_summary(swept).rows]
    copied, row = (shutil.copytree(each, tmp_path / each.name) for each in (run, swept))
    for folder, readers in (
        (copied, lambda file, pages: read_run(copied, file, run, pages=pages)),
        (row, lambda file, pages: read_sweep(row, file, statuses, pages=pages)),
    ):
        assert raw_errors(folder, rng.sample([*mutations(folder)], count), readers, every) == {}


def test_some_wrong_values_in_records_raise_nothing_raw(tmp_path, run, swept):
    check(tmp_path, run, swept, 120, every=10)


@pytest.mark.slow
def test_five_thousand_wrong_values_in_records_raise_nothing_raw(tmp_path, run, swept):
    check(tmp_path, run, swept, 2500)
