"""Load an artefact in another process, and collect its answers, also if that process dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prepare.core.utils.child_process import how_ended
from prepare.errors import RefusedError

if TYPE_CHECKING:
    from prepare.core.forward.call import Call
    from prepare.export.exporter import Exporter

# A process that takes longer for one artefact is killed.
_SECONDS = 900.0


@dataclass(frozen=True)
class ArtefactAnswer:
    """The answer to one call: the tensors, or the error; `crashed` if the process died."""

    outputs: list[Tensor] = field(default_factory=list)
    error: str = ""
    crashed: bool = False


@dataclass(frozen=True)
class LoadedAgain:
    """The answers to all calls, and the metadata that the other process found in the artefact."""

    answers: list[ArtefactAnswer]
    metadata: dict[str, str]


def load_again(exporter: Exporter, artefact: Path, calls: Sequence[Call]) -> LoadedAgain:
    """Call the artefact in a new process; after a death, in another one with the rest of the calls.

    Raises:
        RefusedError: the artefact cannot be loaded.
    """
    _check_archive(artefact)
    answers: dict[int, ArtefactAnswer] = {}
    metadata: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="prepare-export-") as name:
        folder = Path(name)
        for number, call in enumerate(calls):
            torch.save((call.args, call.kwargs), folder / f"call-{number}.pt")
        while left := [number for number in range(len(calls)) if number not in answers]:
            request = {
                "exporter": exporter.name,
                "options": exporter.to_options(),
                "artefact": str(artefact.resolve()),
                "module": type(exporter).__module__,
                "threads": torch.get_num_threads(),
                "calls": left,
            }
            (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
            (folder / "loaded.json").unlink(missing_ok=True)
            death = run_worker(folder, exporter.environment)
            metadata = _loaded(folder, death, artefact)
            for number in left:
                path = folder / f"answer-{number}.pt"
                if not path.exists():
                    answers[number] = ArtefactAnswer(error=death or "it ended early", crashed=True)
                    break
                answers[number] = ArtefactAnswer(**torch.load(path, weights_only=True))
    return LoadedAgain([answers[number] for number in range(len(calls))], metadata)


def run_worker(folder: Path, environment: dict[str, str]) -> str:
    """Run the other process; return how it died, or nothing."""
    command = [sys.executable, "-m", "prepare.export.worker", str(folder)]
    paths = os.pathsep.join(filter(None, sys.path))
    variables = {**os.environ, "PYTHONPATH": paths, **environment}
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, check=False, timeout=_SECONDS, env=variables
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {_SECONDS:.0f} s"
    if not done.returncode:
        return ""
    return f"its process {how_ended(done.returncode)}"


def _check_archive(artefact: Path) -> None:
    """Refuse an archive whose entries would be unpacked outside of a folder."""
    if not zipfile.is_zipfile(artefact):
        return
    with zipfile.ZipFile(artefact) as archive:
        for name in archive.namelist():
            parts = name.replace("\\", "/").split("/")
            if ".." in parts or not parts[0] or ":" in parts[0]:
                wrong = f"holds a file outside of its folder: {name!r}"
                raise RefusedError(artefact.name, wrong, "do not load it")


def _loaded(folder: Path, death: str, artefact: Path) -> dict[str, str]:
    path = folder / "loaded.json"
    found: dict[str, Any] = {"error": death or "its process left no answer"}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
    if found["error"]:
        raise RefusedError(artefact.name, f"cannot be loaded in another process: {found['error']}")
    return found["metadata"]
