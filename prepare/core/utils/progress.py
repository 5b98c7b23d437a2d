"""Report progress: a callable that names what is going on, as a context manager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

# Called with what begins; the context that it returns lasts as long as that.
Stage = Callable[[str], AbstractContextManager[Any]]
