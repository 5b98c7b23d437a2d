"""Load an artefact in another process, and collect its answers, also if that process dies."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prepare.core.forward.nested import numbers_as_tensors, tensors_in
from prepare.core.utils.child_process import Worker
from prepare.errors import RefusedError
from prepare.stages.export.exporter import EXPORTERS, Exporter, Loaded

if TYPE_CHECKING:
    from prepare.core.forward.call import Call

# A call, or a load, that takes longer is ended.
_SECONDS = 900.0
_LONGEST = 300


@dataclass(frozen=True)
class ArtefactAnswer:
    """The answer to one call: the tensors, or the error; `crashed` if the process died."""

    outputs: list[Tensor] = field(default_factory=list)
    error: str = ""
    crashed: bool = False


def load_again(
    exporter: Exporter, artefact: Path, calls: Sequence[Call]
) -> tuple[list[ArtefactAnswer], dict[str, str]]:
    """Call the artefact in a new process; after a death, in another one with the rest of the calls.

    Return the answers, and the metadata that the other process found in the artefact.

    Raises:
        RefusedError: the artefact cannot be loaded.
    """
    _check_archive(artefact)
    asked = {
        "exporter": exporter.name,
        "options": exporter.to_options(),
        "artefact": str(artefact.resolve()),
        "module": type(exporter).__module__,
        "threads": torch.get_num_threads(),
    }
    answers = []
    with (
        TemporaryDirectory(prefix="prepare-export-") as folder,
        Worker(f"{__name__}:answer", exporter.environment) as worker,
    ):
        reply, death = worker.ask([asked, None], seconds=_SECONDS)
        if error := f"its process {death}" if death else reply["error"]:
            wrong = f"cannot be loaded in another process: {error}"
            raise RefusedError(artefact.name, wrong)
        for number, call in enumerate(calls):
            path = Path(folder, f"{number}.pt")
            torch.save((call.args, call.kwargs), path)
            given, death = worker.ask([asked, str(path)], seconds=_SECONDS, fresh=False)
            if death:
                answers.append(ArtefactAnswer(error=f"its process {death}", crashed=True))
            elif given["error"]:
                answers.append(ArtefactAnswer(error=given["error"]))
            else:
                answers.append(ArtefactAnswer(torch.load(path, weights_only=True)))
    return answers, reply["metadata"]


def answer(request: list[Any]) -> dict[str, Any]:
    """Load an artefact and return its metadata, or call it, in a process that knows nothing of its model.

    The request ends with the file of the arguments of a call, whose place the outputs take, or with None.
    """
    asked, path = request
    try:
        exporter, loaded = _load(asked)
        if path is None:
            return {"error": "", "metadata": exporter.metadata(Path(asked["artefact"]))}
        # A file of our own: the parent wrote it a moment ago.
        args, kwargs = torch.load(path, weights_only=False)
        with torch.no_grad():
            values = numbers_as_tensors(loaded(args, kwargs))
            outputs = [each.detach().clone() for each in tensors_in(values)]
        torch.save(outputs, path)
    except Exception as error:
        # All lines of the error: OpenVINO names the place in its own code first.
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"}
    return {"error": ""}


def _load(request: dict[str, Any]) -> tuple[Exporter, Loaded]:
    """Return the exporter and the artefact, anew for each call: it may keep state from one to the next."""
    torch.set_num_threads(request["threads"])
    importlib.import_module(request["module"])  # the module registers the exporter
    exporter = EXPORTERS[request["exporter"]].from_options(request["options"])
    return exporter, exporter.load(Path(request["artefact"]))


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
