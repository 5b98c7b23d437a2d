"""Time the artefact against the unprepared and the prepared model, in paired rounds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from prepare.bench import compare
from prepare.bench.records import PREPARED, UNPREPARED, Comparison
from prepare.export.records import ARTEFACT
from prepare.verify.inputs import format_call

if TYPE_CHECKING:
    from prepare.export.session import ExportSession


def time_artefact(session: ExportSession) -> Comparison:
    """Compare a call of the loaded artefact with one of each model; it has answered rightly before."""
    loaded = session.exporter.load(session.artefact)

    def artefact(*args: Any, **kwargs: Any) -> Any:
        return loaded(args, kwargs)

    prepared = partial(format_call, prepared=session.prepared, pipeline=session.pipeline)
    with session.progress("timing the artefact"):
        return compare(
            {UNPREPARED: session.reference, PREPARED: session.prepared, ARTEFACT: artefact},
            session.call,
            budget=session.budget,
            settle=True,
            format={PREPARED: prepared},
        )
