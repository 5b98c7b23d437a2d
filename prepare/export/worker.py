"""Call an artefact in a process of its own: `python -m prepare.export.worker REQUEST`.

It answers in the folder of the request: `loaded.json`, then a file for each call. A call that ends the
process leaves no file.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from prepare.core.utils.text import first_line

_LONGEST = 300


def answer(folder: Path) -> None:
    """Load the artefact that `request.json` in the folder names, and call it with its calls."""
    import torch

    from prepare.core.forward.nested import tensors_in
    from prepare.export.exporter import EXPORTERS

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    begin = time.perf_counter()
    try:
        importlib.import_module(request["module"])  # it registers the exporter
        exporter = EXPORTERS[request["exporter"]].from_options(request["options"])
        path = Path(request["artefact"])
        loaded = exporter.load(path)
        found: dict[str, Any] = {"error": "", "metadata": exporter.metadata(path)}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {first_line(error)}", "metadata": {}}
    found["seconds"] = time.perf_counter() - begin
    (folder / "loaded.json").write_text(json.dumps(found), encoding="utf-8")
    if found["error"]:
        return
    for number in request["calls"]:
        # A file of our own: the parent wrote it a moment ago.
        args, kwargs = torch.load(folder / f"call-{number}.pt", weights_only=False)
        kept: dict[str, Any] = {"error": "", "outputs": []}
        try:
            with torch.no_grad():
                kept["outputs"] = [
                    each.detach().clone() for each in tensors_in(loaded(args, kwargs))
                ]
        except Exception as error:
            # OpenVINO names the place in its own code first.
            kept["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"
        torch.save(kept, folder / f"answer-{number}.part")
        (folder / f"answer-{number}.part").rename(folder / f"answer-{number}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    answer(Path(sys.argv[1]))
