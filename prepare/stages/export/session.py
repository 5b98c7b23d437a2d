"""Export a model or check an artefact: the stages of an export, each with its verdict."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from prepare import recipe
from prepare.core.forward.call import Call, call_of
from prepare.core.model.deep_copy import CopyError, deep_copy
from prepare.core.utils.environment import environment
from prepare.core.utils.packages import version_of
from prepare.core.utils.process_state import ignored_warnings
from prepare.core.utils.text import first_line
from prepare.core.utils.user_code import causes
from prepare.core.utils.wording import argument
from prepare.errors import ConfigError, FileError, PrepareError, RefusedError
from prepare.pipeline import Pipeline
from prepare.stages.bench import compare
from prepare.stages.bench.records import PREPARED, UNPREPARED, Comparison
from prepare.stages.export.captured import inputs_of
from prepare.stages.export.exportable import take_out, with_format
from prepare.stages.export.exporter import EXPORTERS, Exporter
from prepare.stages.export.layout_checks import (
    CONTIGUOUS,
    InputCase,
    checked,
    conclusion,
    contiguous,
    input_cases,
)
from prepare.stages.export.load_again import load_again
from prepare.stages.export.records import (
    ARTEFACT,
    ArtefactContract,
    Export,
    ExportStage,
    LayoutCheck,
    TakenOut,
)
from prepare.stages.export.reference import Judgement, Reference, outputs_of
from prepare.stages.verify.execution.runner import CannotTellError
from prepare.stages.verify.inputs import format_call, resized

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.utils.progress import Stage


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
        batch: a tensor, a tuple of positional or a mapping of named arguments, or an Example; or a Workload:
            the largest size is captured, the dimensions in which the sizes differ are dynamic, and the
            artefact has to take every size.
        to: the name of an exporter (`prepare.stages.export.EXPORTERS` lists them), or an exporter.
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
    artefact = Path(folder, f"{exporter.file}{exporter.suffix}")
    session = _session(exporter, model, batch, artefact, pipeline, prepared=prepared)
    session.progress = progress
    try:
        artefact.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(str(artefact.parent), f"cannot be made: {error}") from error
    return session.run(budget)


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
    return _session(exporter, model, batch, path, pipeline).run_check()


def _session(
    exporter: Exporter,
    model: nn.Module,
    batch: Any,
    artefact: Path,
    pipeline: Pipeline | None,
    *,
    prepared: nn.Module | None = None,
) -> ExportSession:
    if problem := exporter.missing():
        raise ConfigError.of([problem])
    call = call_of(batch).map(contiguous)
    if not call.tensors():
        raise RefusedError("batch", "it holds no tensor", "give the tensors of one call")
    if model.training:
        raise RefusedError("model", "it is in training mode", "call model.eval() first")
    pipeline = pipeline or Pipeline([])
    if prepared is None:
        # The known issues concern gradients.
        prepared = pipeline.apply(deep_copy(model), known_issues="ignore")
    device = next((each.device for each in prepared.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        wrong = f"the prepared model is on {device}, and artefacts are checked on the CPU"
        raise RefusedError("device", wrong, f"prepare it with {argument('device', 'cpu')}")
    return ExportSession(exporter, model, prepared, pipeline, call, artefact)


class _StoppedError(Exception):
    """A stage could not be done; the record says why."""


@dataclass
class ExportSession:
    """One export: its models, and what its stages have found so far.

    `reference` is the unprepared model, `prepared` the model that the pipeline made of a copy of it. `call`
    is the one that is captured.
    """

    exporter: Exporter
    reference: nn.Module
    prepared: nn.Module
    pipeline: Pipeline
    call: Call
    artefact: Path
    progress: Stage = lambda _: nullcontext()
    stages: list[ExportStage] = field(default_factory=list)
    taken_out: tuple[TakenOut, ...] = ()
    checks: tuple[LayoutCheck, ...] = ()
    contract: ArtefactContract = field(init=False)
    files: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    recipe_inside: bool = False
    time: Comparison | None = None

    def __post_init__(self) -> None:
        self._begin = time.perf_counter()
        self._recipe = recipe.dumps(self.pipeline.to_recipe())
        names = ("torch", "torch-prepare", *self.exporter.packages)
        self._versions = {name: version for name in names if (version := version_of(name))}
        self.contract = ArtefactContract(
            environment=self.exporter.environment,
            requires_contiguous=self.exporter.requires_contiguous,
        )

    def run(self, budget: float) -> Export:
        """Run the stages until one cannot be done, and return the record."""
        stored = {"recipe.yaml": self._recipe, "versions.json": json.dumps(self._versions)}
        with suppress(_StoppedError):
            judge, program = self._capture()
            with self._stage("lower"):
                lowered = self.exporter.lower(program, stored)
            with self._stage("write") as note:
                self._write(lowered, stored)
                note(f"{len(self.files)} files" if len(self.files) > 1 else "")
            self._compare(judge)
            if budget and self._status() == "pass":
                self.time = self._timed(budget)
        return self._record()

    def run_check(self) -> Export:
        """Run the last two stages with an artefact that exists, and return the record."""
        with suppress(_StoppedError):
            self._add_files({self.artefact})
            self._compare(Reference(self.reference, self.prepared, self.call))
        return self._record()

    def _capture(self) -> tuple[Reference, Any]:
        """Make the model ready, and capture it; both are compared with the reference."""
        exporter = self.exporter
        with self._stage("prepare") as note:
            try:
                model = deep_copy(self.prepared).eval()
            except CopyError as error:
                raise RefusedError("model", f"cannot be copied: {error}") from error
            self.taken_out = tuple(take_out(model, exporter, self.pipeline))
            judge = Reference(self.reference, model, self.call)
            wrapped, formats = with_format(model, self.pipeline, self.call, exporter)
            note(judge.judge(outputs_of(wrapped, self.call), self.call))
        inputs = inputs_of(wrapped, self.call, exporter.dynamic)
        self.contract = replace(self.contract, inputs=inputs, formats_inputs=formats)
        with self._stage("capture") as note:
            # A dynamic size has to differ from 1 in the call that is captured.
            one = 0 in exporter.dynamic and self.call.batch == 1
            program = exporter.capture(wrapped, resized(self.call, 2) if one else self.call)
            captured = exporter.run_captured(program)
            note(judge.judge(outputs_of(captured, self.call), self.call))
        return judge, program

    def _write(self, lowered: Any, stored: dict[str, str]) -> None:
        before = self._stamps()
        try:
            for path in self._named():
                if path.is_symlink():  # writing to the link would write outside of the folder
                    path.unlink()
            self.exporter.write(lowered, self.artefact, stored)
        except OSError as error:
            raise FileError(str(self.artefact), f"cannot be written: {error}") from error
        self._add_files(path for path, stamp in self._stamps().items() if before.get(path) != stamp)

    def _named(self) -> Iterable[Path]:
        """Return what has the name of the artefact, with any suffix."""
        return self.artefact.parent.glob(f"{self.exporter.file}.*")

    def _stamps(self) -> dict[Path, int]:
        """Return the time of the last change of each file that has the name of the artefact."""
        return {path: path.stat().st_mtime_ns for path in self._named() if path.is_file()}

    def _add_files(self, paths: Iterable[Path]) -> None:
        for path in sorted(paths):
            content = path.read_bytes()
            self.files[path.name] = hashlib.sha256(content).hexdigest()
            self.bytes += len(content)

    def _compare(self, judge: Reference) -> None:
        dynamic = 0 in self.exporter.dynamic
        cases = list(input_cases(self.call, dynamic_batch=dynamic))
        with self._stage("load") as note:
            calls = [case.call for case in cases]
            answers, stored = load_again(self.exporter, self.artefact, calls)
            self.recipe_inside = stored.get("recipe.yaml") == self._recipe
            note("" if self.recipe_inside else "the recipe is beside the artefact, not in it")
        with self._stage("compare") as note:
            pairs = zip(cases, answers, strict=True)
            checks = [(case, checked(judge, case, answer)) for case, answer in pairs]
            self.checks = tuple(self._allowed(case, check) for case, check in checks)
            of_call = (c for c in self.checks if c.batch == self.call.batch and not c.size)
            layouts = {check.layout: check.answer for check in of_call}
            self.contract = replace(self.contract, layouts=layouts)
            note(self._with_remedy(conclusion(self.checks)))

    def _allowed(self, case: InputCase, check: LayoutCheck) -> LayoutCheck:
        """Return a check that passes if its input is not one that the contract allows."""
        excluded = self.contract.requires_contiguous and case.layout != CONTIGUOUS
        return replace(check, status="pass") if excluded and check.answer == "wrong" else check

    def _with_remedy(self, judgement: Judgement) -> Judgement:
        """Add the exporter's advice if only layouts that are not contiguous are answered wrongly."""
        wrong = {check.layout for check in self.checks if check.status == "fail"}
        remedy = self.exporter.layout_remedy
        if not remedy or not wrong or CONTIGUOUS in wrong:
            return judgement
        return replace(judgement, note=f"{judgement.note}; {remedy}")

    def _timed(self, budget: float) -> Comparison:
        """Compare a call of the loaded artefact with one of each model; it has answered rightly before."""
        loaded = self.exporter.load(self.artefact)
        prepared = partial(format_call, prepared=self.prepared, pipeline=self.pipeline)
        with self.progress("timing the artefact"):
            return compare(
                {
                    UNPREPARED: self.reference,
                    PREPARED: self.prepared,
                    ARTEFACT: lambda *args, **kwargs: loaded(args, kwargs),
                },
                self.call,
                budget=budget,
                settle=True,
                format={PREPARED: prepared},
            )

    @contextmanager
    def _stage(self, name: str) -> Iterator[Callable[[Any], None]]:
        """Run one stage; an error in it stops the export. The function takes a note or a judgement."""
        begin, given = time.perf_counter(), Judgement("pass")

        def note(value: Any) -> None:
            nonlocal given
            given = value if isinstance(value, Judgement) else Judgement("pass", note=str(value))

        try:
            # Libraries warn of their own deprecated calls.
            with self.progress(f"exporting: {name}"), ignored_warnings():
                yield note
        except (FileError, KeyboardInterrupt, MemoryError):
            raise
        except CannotTellError as error:
            given = Judgement("cannot tell", note=str(error))
        except PrepareError as error:
            given = Judgement("refused", note=str(error))
        except Exception as error:
            given = Judgement("refused", note=_error_text(error))
        seconds = time.perf_counter() - begin
        self.stages.append(ExportStage(name=name, seconds=seconds, **vars(given)))
        if given.status == "refused" or (given.status == "cannot tell" and name == "prepare"):
            raise _StoppedError

    def _status(self) -> str:
        statuses = {stage.status for stage in self.stages}
        return next(
            (word for word in ("refused", "fail", "cannot tell") if word in statuses), "pass"
        )

    def _record(self) -> Export:
        status = self._status()
        first = next((stage for stage in self.stages if stage.status == status != "pass"), None)
        return Export(
            status=status,
            reason=f"{first.name}: {first.note}" if first else "",
            exporter=self.exporter.name,
            options=self.exporter.to_options(),
            artefact=self.artefact.name if self.files else "",
            sha256=self.files.get(self.artefact.name, ""),
            bytes=self.bytes,
            files=self.files,
            recipe=self._recipe,
            recipe_inside=self.recipe_inside,
            versions=self._versions,
            contract=self.contract,
            taken_out=self.taken_out,
            stages=tuple(self.stages),
            checks=self.checks,
            time=self.time,
            seconds=round(time.perf_counter() - self._begin, 3),
            environment=environment(),
        )


def _error_text(error: BaseException) -> str:
    """Return the first line of an error, and those of its causes."""
    return "; ".join(f"{type(each).__name__}: {first_line(each)}" for each in causes(error))
