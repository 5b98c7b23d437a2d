"""The stages of an export, one after the other, each with its verdict."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare import recipe
from prepare.bench import compare
from prepare.bench.records import PREPARED, UNPREPARED, Comparison
from prepare.core.model.deep_copy import CopyError, deep_copy
from prepare.core.utils.environment import environment
from prepare.core.utils.process_state import ignored_warnings
from prepare.core.utils.text import first_line
from prepare.errors import FileError, PrepareError, RefusedError
from prepare.export.capture import inputs_of
from prepare.export.exportable import take_out, with_format
from prepare.export.input_layouts import CONTIGUOUS, InputCase, input_cases
from prepare.export.layout_checks import checked, conclusion
from prepare.export.load_again import load_again
from prepare.export.records import (
    ARTEFACT,
    ArtefactContract,
    Export,
    ExportStage,
    LayoutCheck,
    TakenOut,
)
from prepare.export.reference import Judgement, Reference, outputs_of
from prepare.verify.execution.runner import CannotTellError
from prepare.verify.inputs import format_call, resized

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.call import Call
    from prepare.core.utils.progress import Stage
    from prepare.export.exporter import Exporter
    from prepare.pipeline import Pipeline


class _StoppedError(Exception):
    """A stage could not be done; the record says why."""


@dataclass
class ExportSession:
    """One export: its models, and what its stages have found so far.

    `reference` is the unprepared model, `prepared` the model that the pipeline made of a copy of it.
    """

    exporter: Exporter
    reference: nn.Module
    prepared: nn.Module
    pipeline: Pipeline
    call: Call
    folder: Path
    budget: float = 0.0
    progress: Stage = lambda _: nullcontext()
    stages: list[ExportStage] = field(default_factory=list)
    taken_out: tuple[TakenOut, ...] = ()
    checks: tuple[LayoutCheck, ...] = ()
    contract: ArtefactContract = field(default_factory=ArtefactContract)
    files: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    recipe_inside: bool = False
    time: Comparison | None = None
    existing: Path | None = None

    @property
    def artefact(self) -> Path:
        """The file of the artefact."""
        return self.existing or self.folder / f"{self.exporter.file}{self.exporter.suffix}"

    @property
    def _recipe(self) -> str:
        return recipe.dumps(self.pipeline.to_recipe())

    def run(self) -> Export:
        """Run the stages until one cannot be done, and return the record."""
        begin = time.perf_counter()
        stored = self._metadata()
        with suppress(_StoppedError):
            judge, program = self._capture()
            with self._stage("lower"):
                lowered = self.exporter.lower(program, stored)
            with self._stage("write") as note:
                self._write(lowered, stored)
                note(f"{len(self.files)} files" if len(self.files) > 1 else "")
            self._compare(judge)
            if self.budget and self._status() == "pass":
                self.time = self._timed()
        return self._record(time.perf_counter() - begin)

    def run_check(self) -> Export:
        """Run the last two stages with an artefact that exists, and return the record."""
        begin = time.perf_counter()
        self.contract = self._contract()
        with suppress(_StoppedError):
            self._add_files({self.artefact})
            self._compare(Reference(self.reference, self.prepared, self.call))
        return self._record(time.perf_counter() - begin)

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
            strides = "input_format" in exporter.keeps
            wrapped, formats = with_format(model, self.pipeline, self.call, strides=strides)
            note(judge.judge(outputs_of(wrapped, self.call), self.call))
        inputs = inputs_of(wrapped, self.call, exporter.dynamic)
        self.contract = self._contract(inputs=inputs, formats_inputs=formats)
        with self._stage("capture") as note:
            program = exporter.capture(wrapped, self._captured_call())
            captured = exporter.run_captured(program)
            note(judge.judge(outputs_of(captured, self.call), self.call))
        return judge, program

    def _contract(self, **known: Any) -> ArtefactContract:
        exporter = self.exporter
        return ArtefactContract(
            **known,
            environment=exporter.environment,
            requires_contiguous=exporter.requires_contiguous,
        )

    def _captured_call(self) -> Call:
        """Return the call to capture: a dynamic size has to differ from 1."""
        one = 0 in self.exporter.dynamic and self.call.batch == 1
        return resized(self.call, 2) if one else self.call

    def _write(self, lowered: Any, stored: dict[str, str]) -> None:
        before = self._stamps()
        try:
            for path in self.folder.glob(f"{self.exporter.file}.*"):
                if path.is_symlink():  # writing to it would write outside of the folder
                    path.unlink()
            self.exporter.write(lowered, self.artefact, stored)
        except OSError as error:
            raise FileError(str(self.artefact), f"cannot be written: {error}") from error
        self._add_files(path for path, stamp in self._stamps().items() if before.get(path) != stamp)

    def _stamps(self) -> dict[Path, int]:
        """Return the time of the last change of each file that has the name of the artefact."""
        files = self.folder.glob(f"{self.exporter.file}.*")
        return {path: path.stat().st_mtime_ns for path in files if path.is_file()}

    def _add_files(self, paths: Iterable[Path]) -> None:
        for path in sorted(paths):
            content = path.read_bytes()
            self.files[path.name] = hashlib.sha256(content).hexdigest()
            self.bytes += len(content)

    def _compare(self, judge: Reference) -> None:
        dynamic = 0 in self.exporter.dynamic
        cases = list(input_cases(self.call, dynamic_batch=dynamic))
        with self._stage("load") as note:
            loaded = load_again(self.exporter, self.artefact, [case.call for case in cases])
            self.recipe_inside = loaded.metadata.get("recipe.yaml") == self._recipe
            note("" if self.recipe_inside else "the recipe is beside the artefact, not in it")
        with self._stage("compare") as note:
            pairs = zip(cases, loaded.answers, strict=True)
            found = [(case, checked(judge, case, answer)) for case, answer in pairs]
            self.checks = tuple(self._allowed(case, check) for case, check in found)
            layouts = {
                check.layout: check.answer
                for check in self.checks
                if check.batch == self.call.batch
            }
            self.contract = replace(self.contract, layouts=layouts)
            note(self._with_remedy(conclusion(self.checks)))

    def _allowed(self, case: InputCase, check: LayoutCheck) -> LayoutCheck:
        """Return a check that passes if its input is not one that the contract allows."""
        excluded = self.contract.requires_contiguous and case.layout != CONTIGUOUS
        return replace(check, status="pass") if excluded and check.answer == "wrong" else check

    def _with_remedy(self, found: Judgement) -> Judgement:
        """Add the exporter's advice if only layouts that are not contiguous are answered wrongly."""
        wrong = {check.layout for check in self.checks if check.status == "fail"}
        remedy = self.exporter.layout_remedy
        if not remedy or not wrong or CONTIGUOUS in wrong:
            return found
        return replace(found, note=f"{found.note}; {remedy}")

    def _timed(self) -> Comparison:
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
                budget=self.budget,
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
        self.stages.append(
            ExportStage(
                name=name,
                status=given.status,
                seconds=seconds,
                note=given.note,
                error=given.error,
                allowed=given.allowed,
            )
        )
        if given.status == "refused" or (given.status == "cannot tell" and name == "prepare"):
            raise _StoppedError

    def _metadata(self) -> dict[str, str]:
        return {
            "recipe.yaml": self._recipe,
            "versions.json": json.dumps(self._versions()),
        }

    def _versions(self) -> dict[str, str]:
        names = ("torch", "torch-prepare", *self.exporter.packages)
        return {name: version for name in names if (version := _version(name))}

    def _status(self) -> str:
        found = {stage.status for stage in self.stages}
        return next((word for word in ("refused", "fail", "cannot tell") if word in found), "pass")

    def _record(self, seconds: float) -> Export:
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
            versions=self._versions(),
            contract=self.contract,
            taken_out=self.taken_out,
            stages=tuple(self.stages),
            checks=self.checks,
            time=self.time,
            seconds=round(seconds, 3),
            environment=environment(),
        )


def _error_text(error: BaseException) -> str:
    """Return the first line of an error, and that of its cause."""
    text = f"{type(error).__name__}: {first_line(error)}"
    return f"{text}; {_error_text(error.__cause__)}" if error.__cause__ else text


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
