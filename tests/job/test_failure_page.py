"""The page of a job that failed: it is written, and never hides the error."""

import re

from page_reader import Reader
from prepare.app.cli import main as cli
from prepare.app.job.record import Record

RAISES = ("model._target_=sample_nets.raises", "input.shape=[1,3,8,8]")


def test_a_failed_job_has_a_page_with_line_and_stage(tmp_path):
    assert cli.run([*RAISES, f"hydra.run.dir={tmp_path}"]) == 1
    result = Record(tmp_path).result()
    assert result.done == ["starting torch"]
    assert result.during == "building sample_nets.raises"
    found = Reader((tmp_path / "report.html").read_text()).text
    assert re.search(r"Where\? \S*sample_nets\.py:\d+, in raises ", found)
    for phrase in ("When? While building sample_nets.raises", "Traceback"):
        assert phrase in found, phrase
    assert "starting torch" in found
