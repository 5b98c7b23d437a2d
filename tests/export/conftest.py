"""The stub exporters, a worker that answers in this process, and artefacts of the real formats."""

import shutil

import pytest

from export_nets import batch, needs, network
from prepare.stages.export import EXPORTERS, export, load_again
from stub_exporters import STUBS


class InProcess:
    """Answer the requests of an export as `Worker` does, without another process."""

    def __init__(self, function, environment):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass

    def ask(self, request, *, seconds, fresh=True):
        return load_again.answer(request), ""


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
    """Answer in this process; `Dies` would end it."""
    monkeypatch.setattr(load_again, "Worker", InProcess)
    return InProcess


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Return the folder of an artefact, which is exported once for each format."""
    folders = {}

    def folder_of(to):
        if to not in folders:
            folder = tmp_path_factory.mktemp(to)
            done = export(network(), batch(), to=to, folder=folder)
            assert (done.status, done.reason) == ("pass", "")
            folders[to] = folder
        return folders[to]

    return folder_of


@pytest.fixture
def copied(made, tmp_path, in_process):
    def copy(to):
        needs(to)
        return shutil.copytree(made(to), tmp_path / to)

    return copy
