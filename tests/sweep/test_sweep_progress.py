"""The progress of a sweep: its counts, and a spinner that has a text from the start."""

from prepare.app.job.record import Job, Record, Result
from prepare.app.report.sweep_progress import SweepProgress
from prepare.app.sweep.manifest import SweepManifest

ROWS = [["seed=0"], ["seed=1"], ["seed=2"]]
MANIFEST = SweepManifest("s", ROWS, ["a", "b", "c"])


def ended(folder):
    """Watch three rows that end: one is well, one is interrupted, one fails."""
    progress = SweepProgress(folder, MANIFEST)
    progress.start()
    for number, status in enumerate(("ok", "interrupted", "failed")):
        record = Record(folder / str(number))
        record.begin(Job(number, "s", ROWS[number], {}, identity="abc"[number]))
        record.write_result(Result(status))
    progress.stop()


def test_a_pipe_gets_the_rows_that_fail_only(tmp_path, capsys):
    ended(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("#2 seed=2: failed, ")
    assert line.endswith("(3 of 3 done, 1 failed, 1 interrupted)")
