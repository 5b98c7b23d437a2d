"""Report progress: the type of a callable that announces a stage of a job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

# Called with the name of the stage that begins; returns a context that lasts as long as the stage.
Stage = Callable[[str], AbstractContextManager[Any]]
