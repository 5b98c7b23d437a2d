"""The answers of the last `doctor` on this very machine, which outrank what the table says."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from prepare.core.model.known_issues import Issue, issues, standing
from prepare.core.utils.cache_folder import cache_folder
from prepare.core.utils.environment import machine_identity

VERDICTS = ("wrong here", "inexact here", "slow here", "fine here", "not probed")
WRONG, INEXACT, SLOW, FINE, NOT_PROBED = VERDICTS
# After this many seconds an answer is not asked any more.
_FRESH = 30 * 86400


def answers_file(device: str) -> Path:
    """Return the file of the answers for this type of device; its name is a digest of the machine."""
    identity = {"device": device.partition(":")[0], **machine_identity()}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder("doctor") / f"{digest}.json"


def fresh_answers(device: str) -> Mapping[str, str]:
    """Return the verdict for each name of an issue; empty without a `doctor` in the last 30 days.

    A change of torch, the accelerator's libraries or the processor makes the answers of before void.
    """
    path = answers_file(device)
    try:
        changed = path.stat().st_mtime
    except OSError:
        return {}
    return _read(path, changed) if time.time() - changed < _FRESH else {}


def standing_here(device: str) -> list[Issue]:
    """Return the issues of this type of device: by a fresh `doctor`, else by the table."""
    answers = fresh_answers(device)
    by_table = set(standing(device))
    return [
        issue
        for issue in issues()
        if (answers.get(issue.name) in (WRONG, INEXACT, SLOW))
        or (issue in by_table and answers.get(issue.name) != FINE)
    ]


@cache
def _read(path: Path, _changed: float) -> Mapping[str, str]:
    try:
        findings = json.loads(path.read_text(encoding="utf-8"))["findings"]
        return {each["name"]: each["verdict"] for each in findings}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
