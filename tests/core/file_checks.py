"""Failures of the disk, and short cuts of the tests of files."""

import errno
import os
from pathlib import Path

import pytest

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
posix = pytest.mark.skipif(os.name != "posix", reason="asks for links, modes and signals of POSIX")


def names(folder: Path) -> list[str]:
    return sorted(found.name for found in folder.iterdir())
