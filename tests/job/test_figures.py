"""The flat mapping of a job's figures."""

from made_benches import bench, comparison
from prepare.job.results import Analyses


def test_what_did_not_run_has_no_key():
    assert Analyses().figures() == {}


def test_the_times_divide_to_their_ratio():
    found = Analyses(found={"bench": bench(comparison(0.73))}).figures()
    assert found["prepared_seconds"] / found["unprepared_seconds"] == found["time_ratio"]
