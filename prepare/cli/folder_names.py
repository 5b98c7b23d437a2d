"""Names of folders: a unique name for a run, and a readable name for a row of a sweep."""

import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from datetime import datetime

_SLUG_LENGTH = 100
# Overrides that change how a sweep runs and not its results: they are not part of a name.
_NOT_NAMED = ("isolate=", "resume=", "overwrite=")


def unique() -> str:
    """Return a name that no two runs share, on any machine: microseconds, process and two random bytes."""
    return f"{datetime.now().astimezone():%f}-{os.getpid()}-{secrets.token_hex(2)}"


def slug(overrides: Iterable[str]) -> str:
    """Return the overrides of a row as the name of a folder: ASCII, without slashes, 100 letters at most."""
    text = ",".join(word for word in map(str, overrides) if not word.startswith(_NOT_NAMED))
    name = re.sub(r"[^\w.=,-]+", "-", text, flags=re.ASCII).strip("-.")
    if len(name) > _SLUG_LENGTH:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        name = f"{name[: _SLUG_LENGTH - 9]}-{digest}"
    return name or "defaults"
