"""The flat mapping of a job's figures."""

from prepare.job.figures import figures
from prepare.job.results import Analyses


def test_what_did_not_run_has_no_key():
    assert figures(Analyses()) == {}
