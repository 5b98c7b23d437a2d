"""Keep what torch's compiler makes in a folder, so that a later process reads it and compiles nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prepare.core.utils.files import printable_path
from prepare.core.utils.text import plural
from prepare.errors import FileError

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_COMPILED = ("fxgraph_cache_miss", "fxgraph_cache_bypass")


class CacheCounts:
    """Counts of the graphs that inductor has read from the folder, and compiled, since it was opened."""

    def __init__(self) -> None:
        self._before = _counts()

    @property
    def read(self) -> int:
        """The graphs that were read."""
        return self._since("fxgraph_cache_hit")

    @property
    def compiled(self) -> int:
        """The graphs that were compiled."""
        return sum(map(self._since, _COMPILED))

    def __str__(self) -> str:
        return f"{plural(self.read, 'graph')} read, {self.compiled} compiled"

    def _since(self, name: str) -> int:
        return _counts().get(name, 0) - self._before.get(name, 0)


@contextmanager
def compile_cache(folder: str | Path) -> Iterator[CacheCounts]:
    """Keep what inductor compiles inside this context in `folder`, and read from it what is there already.

    Make the first calls of a compiled model inside. A later process with the same folder, torch, kind of
    machine and shapes compiles nothing: the object that the context yields counts what was `read` and what
    was `compiled`. torch executes the code in the folder, so use only one that you trust.

    Raises:
        FileError: the folder cannot be made.
    """
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        wrong = f"cannot be made: {error.strerror}"
        raise FileError(printable_path(path), wrong, "choose another folder") from error
    before = os.environ.get(_FOLDER)
    os.environ[_FOLDER] = str(path)
    try:
        yield CacheCounts()
    finally:
        if before is None:
            os.environ.pop(_FOLDER, None)
        else:
            os.environ[_FOLDER] = before


def _counts() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return dict(counters["inductor"])
