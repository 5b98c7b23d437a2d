"""Export a prepared model, and check the artefact in another process: its outputs, and its input layouts.

Examples:
    >>> from torch import nn, randn
    >>> from prepare.pipeline import Pipeline
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    >>> pipeline = Pipeline.from_config({"conv2d_memory_format": {}, "input_format": {}})
    >>> done = export(model, randn(2, 3, 8, 8), to="onnx", folder="out", pipeline=pipeline)  # doctest: +SKIP
    >>> done.status, done.contract.layouts  # doctest: +SKIP
    ('pass', {'contiguous': 'right', 'channels_last': 'right', ...})
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.core.utils.wording import argument
from prepare.errors import ConfigError, FileError, RefusedError
from prepare.export.exporter import EXPORTERS, Exporter, register
from prepare.export.records import ArtefactContract, Export, InputContract, LayoutCheck, TakenOut

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.utils.progress import Stage
    from prepare.export.session import ExportSession
    from prepare.pipeline import Pipeline

__all__ = [
    "EXPORTERS",
    "ArtefactContract",
    "Export",
    "Exporter",
    "InputContract",
    "LayoutCheck",
    "TakenOut",
    "check",
    "export",
    "register",
]


def export(
    model: nn.Module,
    batch: Any,
    *,
    to: str | Exporter,
    folder: str | Path,
    pipeline: Pipeline | None = None,
    prepared: nn.Module | None = None,
    budget: float = 0.0,
    progress: Stage = lambda _: nullcontext(),
    **options: Any,
) -> Export:
    """Export a model, load the artefact in another process, and compare its outputs with exact ones.

    The stages are prepare, capture, lower, write, load and compare; each has a verdict, and one that cannot
    be done ends the export with the status `refused`. The artefact is called with the batch contiguous,
    channels-last, transposed and with gaps between its numbers, and with one and two samples. Outputs are
    compared with those of `model` in float64, with the tolerance of `prepare.verify`. An input that it takes
    and answers wrongly is a failure; one that it refuses with an error is not, unless it is contiguous, or
    its batch size is promised by `dynamic=[0]`.

    Args:
        model: the unprepared model, in mode eval; it is not changed.
        batch: a tensor, a tuple of positional or a mapping of named arguments, or an Example.
        to: the name of an exporter (`prepare.export.EXPORTERS` lists them), or an exporter.
        folder: the folder for the artefact; nothing is written outside of it.
        pipeline: prepares a copy of the model; without one, the model is exported as it is.
        prepared: the model that `pipeline` has prepared, if there is one already.
        budget: seconds for a paired timing of the artefact against both models; 0 for none.
        progress: called when a stage begins.
        options: the options of the exporter, as `dynamic=[0]` and `file="name"`.

    Raises:
        ConfigError: no such exporter or option, or a package that it needs is not installed.
        RefusedError: the batch holds no tensor, or the model is in training mode.
        FileError: the artefact cannot be written.
    """
    exporter = to if isinstance(to, Exporter) else EXPORTERS[to].from_options(options)
    path = Path(folder)
    session = _session(exporter, model, batch, path, pipeline=pipeline, prepared=prepared)
    session.budget, session.progress = budget, progress
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(str(path), f"cannot be made: {error}") from error
    return session.run()


def check(
    artefact: str | Path,
    model: nn.Module,
    batch: Any,
    *,
    to: str | Exporter,
    pipeline: Pipeline | None = None,
    **options: Any,
) -> Export:
    """Load an artefact that exists in another process, and compare its outputs, as `export` does.

    For an artefact that another tool has changed since, for example to make it smaller. It is run: check
    only one that you trust.

    Args:
        artefact: the file.
        model: the unprepared model, in mode eval.
        batch: the inputs, as for `export`.
        to: the exporter that can load it.
        pipeline: the recipe of the artefact, which sets the dtype that its errors are measured by.
        options: the options of the exporter.

    Raises:
        ConfigError: no such exporter or option, or a package that it needs is not installed.
        RefusedError: the batch holds no tensor, or the model is in training mode.
        FileError: the artefact is missing.
    """
    exporter = to if isinstance(to, Exporter) else EXPORTERS[to].from_options(options)
    path = Path(artefact)
    if not path.is_file():
        raise FileError(str(path), "does not exist", "give the file of an artefact")
    session = _session(exporter, model, batch, path.parent, pipeline=pipeline)
    session.existing = path
    return session.run_check()


def _session(
    exporter: Exporter,
    model: nn.Module,
    batch: Any,
    folder: Path,
    *,
    pipeline: Pipeline | None,
    prepared: nn.Module | None = None,
) -> ExportSession:
    if problem := exporter.missing():
        raise ConfigError.of([problem])
    from prepare.core.forward.call import call_of
    from prepare.core.model.deep_copy import deep_copy
    from prepare.export.exportable import device_of
    from prepare.export.input_layouts import contiguous
    from prepare.export.session import ExportSession
    from prepare.pipeline import Pipeline as AnyPipeline

    call = call_of(batch)
    if not call.tensors():
        raise RefusedError("batch", "it holds no tensor", "give the tensors of one call")
    if model.training:
        raise RefusedError("model", "it is in training mode", "call model.eval() first")
    declared = pipeline or AnyPipeline([])
    if prepared is None:
        # The known issues are those of gradients.
        prepared = declared.apply(deep_copy(model), known_issues="ignore")
    if (device := device_of(prepared)).type != "cpu":
        wrong = f"the prepared model is on {device}, and artefacts are checked on the CPU"
        raise RefusedError("device", wrong, f"prepare it with {argument('device', 'cpu')}")
    return ExportSession(
        exporter=exporter,
        reference=model,
        prepared=prepared,
        pipeline=declared,
        call=call.map(contiguous),
        folder=folder,
    )
