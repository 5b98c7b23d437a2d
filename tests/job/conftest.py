"""A folder with modules of networks, for the tests of faults."""

import sys
import textwrap
from pathlib import Path

import pytest

from run_faults import NETS


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, which holds the module `nets`."""
    (tmp_path / "nets.py").write_text(textwrap.dedent(NETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    yield tmp_path
    sys.modules.pop("nets", None)
