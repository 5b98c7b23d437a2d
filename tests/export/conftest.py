"""The stub exporters, and a worker that answers in this process."""

import pytest

from prepare.export import EXPORTERS, load_again, worker
from stub_exporters import STUBS


@pytest.fixture(autouse=True)
def stubs():
    known = list(EXPORTERS)  # the built-in ones are imported
    for name, cls in STUBS.items():
        EXPORTERS.register(name, cls)
    yield
    for name in STUBS:
        EXPORTERS._classes.pop(name)
    assert list(EXPORTERS) == known


@pytest.fixture
def in_process(monkeypatch):
    """Answer in this process; `Dies` would end it, and is run as the others do."""

    def run(folder, environment):
        worker.answer(folder)
        return ""

    monkeypatch.setattr(load_again, "run_worker", run)
