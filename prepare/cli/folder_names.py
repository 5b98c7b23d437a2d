"""Names of folders: one that no two runs share, and one that says what a row of a sweep is."""

import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from datetime import datetime

_SLUG_LENGTH = 100
# How a sweep is run: what it does stays the same, and so do its folders.
_HOW = ("isolate=", "resume=")


def unique() -> str:
    """Microseconds, process and two random bytes: no two runs get the same, on any machine."""
    return f"{datetime.now().astimezone():%f}-{os.getpid()}-{secrets.token_hex(2)}"


def slug(overrides: Iterable[str]) -> str:
    """The overrides of a row as the name of a folder: ASCII, no slashes, never too long for one."""
    text = ",".join(word for word in map(str, overrides) if not word.startswith(_HOW))
    name = re.sub(r"[^\w.=,-]+", "-", text, flags=re.ASCII).strip("-.")
    if len(name) > _SLUG_LENGTH:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        name = f"{name[: _SLUG_LENGTH - 9]}-{digest}"
    return name or "defaults"
