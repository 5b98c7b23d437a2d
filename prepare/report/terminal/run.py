"""Terminal output of a single job: a short table, or one line for each error."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from prepare.contract.summary import check_lines
from prepare.core.model.memory_format import satisfied
from prepare.core.utils.text import line, output, plural, printable, size
from prepare.report.sentences import autocast_text
from prepare.report.terminal.console import console, has_width, show_table
from prepare.report.terminal.flow import show_flow
from prepare.report.terminal.patch import show_patch
from prepare.report.terminal.run_rows import answer_rows, declared, detail_rows
from prepare.report.terminal.tune import show_tune
from prepare.report.terminal.verify import show_verify

if TYPE_CHECKING:
    from prepare.contract.records import ContractCheck
    from prepare.flow.records import Flow
    from prepare.job.outcome import Outcome
    from prepare.job.results import Results
    from prepare.plan import TensorPlan
    from prepare.reduce.records import Reduction

_SHOWN = 10
# The width of the longest label, `convolutions`.
_LABEL = 12


class RunOutput:
    """The output of a single job: each line as soon as it is known."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._shown = shown_folder(folder), 0

    def show(self, results: Results) -> None:
        """Print what these results add to those that were shown."""
        if results.audit is None:
            return
        rows = answer_rows(results, results.audit)
        if not self._shown:
            if results.tuning is not None:
                show_tune(results.tuning, _file(self._folder, "tune.json"))
            line(f"{printable(results.model)} is prepared: {declared(results)}")
        _show_rows(rows[self._shown :])
        self._shown = len(rows)
        sys.stdout.flush()

    def end(self, outcome: Outcome) -> None:
        """Print the rest, or the errors of the job."""
        results = outcome.results
        if results is not None:
            self._show_rest(results)
        if results is None or outcome.result.status in ("failed", "interrupted"):
            show_problems((outcome.result.error or "").splitlines())
            if outcome.result.traceback:
                file = _file(self._folder, "traceback.txt")
                line(f"the traceback is in {file}", errors=True)

    def _show_rest(self, results: Results) -> None:
        if results.audit is not None:
            self.show(results)
            _show_rows(detail_rows(results, results.audit, self._folder))
            _show_last("files", self._folder)
        elif results.flow is not None:
            show_unprepared(results, results.flow, self._folder)
        else:
            show_plan(results, self._folder)
        _show_warnings(results.warnings)
        if results.reduction is not None:
            _show_reduction(results.reduction, _file(self._folder, "reduced.py"))
        if results.patch is not None:
            show_patch(results.patch, _file(self._folder, "patch.diff"))
        if results.contract is not None:
            _show_contract(results.contract)
        verification = results.verification
        if verification is not None and verification.status == "fail":
            show_verify(verification, _file(self._folder, "verify.json"))


def _show_reduction(reduction: Reduction, file: str) -> None:
    """Print what the reduced script shows, where it is, and whether the fault is known."""
    known = f"known: {reduction.known}" if reduction.known else "not in the table of known issues"
    line(
        printable(
            f"reduced: {reduction.module}: nn.{reduction.call.kind} {reduction.text} ({known})"
        )
    )
    line(printable(f"the script, with torch alone: {file}"))


def _show_contract(check: ContractCheck) -> None:
    """Print a check, and how to write the contract again."""
    for text in check_lines(check, file=check.file, update="add contract.update=true"):
        line(text)


def _show_warnings(warnings: Iterable[str]) -> None:
    """Print the warnings, and each advice once, after the warnings that share it."""
    by_advice: dict[str, list[str]] = {}
    for warning in warnings:
        text, separator, advice = warning.rpartition("; ")
        by_advice.setdefault(advice if separator else "", []).append(text if separator else warning)
    for advice, texts in by_advice.items():
        for text in texts:
            line(printable(f"warning: {text}"), errors=True)
        if advice:
            line(printable(f"  {advice}"), errors=True)


def shown_folder(folder: Path) -> str:
    """Return a path that can be copied; relative if it is below the current folder."""
    relative = os.path.relpath(folder)
    # A run with hydra.job.chdir=true is in its folder, and the user is not.
    outside = relative == os.curdir or relative.startswith(os.pardir)
    return printable(folder.absolute() if outside else relative)


def show_plan(results: Results, folder: str) -> None:
    """Print the plan of a pipeline and the first tensors that it would change."""
    plan, steps = results.plan.summary(), declared(results)
    rows = [("to change", f"{plan['to_change']} of {plural(plan['tensors'], 'tensor')}")]
    rows += [("wanted by", f"{name}: {count}") for name, count in plan["by_step"].items()]
    rows.append(("memory", f"{size(plan['bytes_before'])} now, {size(plan['bytes_after'])} after"))
    rows.append(("written", size(plan["bytes_written"])))
    rows += [("note", problem) for problem in results.notes]
    line(f"{printable(results.model)} would be prepared: {steps}; nothing was changed")
    width = max(len(label) for label, _ in rows)
    _show_rows(rows, width=width)
    _show_last("files", folder, width=width)
    if changing := [tensor for tensor in results.plan.tensors if tensor.changes]:
        _show_changes(changing)


def show_unprepared(results: Results, flow: Flow, folder: str) -> None:
    """Print the layout flow of a model that is not prepared."""
    under = autocast_text(results.amp)
    line(f"{printable(results.model)} is not prepared{under and f', {under}'}")
    for problem in results.notes:
        line(printable(problem))
    show_flow(flow, folder)


def show_problems(problems: Iterable[Any]) -> None:
    """Print one line for each problem on stderr."""
    for problem in problems:
        line(printable(problem), errors=True)


def _file(folder: str, name: str) -> str:
    return os.path.join(folder, name)  # noqa: PTH118  a path for reading, not for use


def _show_changes(changing: list[TensorPlan]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("tensor", "shape", "change", "wanted by"):
        table.add_column(title, overflow="fold")
    for plan in changing[:_SHOWN]:
        sides = [
            _side(side, old, new, shape=plan.shape)
            for side, old, new in zip(plan.old._fields, plan.old, plan.new, strict=True)
            if old != new
        ]
        table.add_row(
            printable(f"{plan.module}.{plan.tensor}" if plan.module else plan.tensor),
            _value(plan.shape),
            "\n".join(sides),
            "\n".join(plan.changing),
        )
    line("")
    show_table(table)
    if len(changing) > _SHOWN:
        line(f"... and {plural(len(changing) - _SHOWN, 'tensor')} more; plan.json has them all")


def _show_rows(rows: list[tuple[str, str]], *, width: int = _LABEL) -> None:
    """Print rows of label and text; in a pipe a line ends at a space only, as calls are copied."""
    width = max([width, *(len(label) for label, _ in rows)])
    room = max(console().width - width - 4, 20)
    last = ""
    for label, text in rows:
        begin = "" if label == last else label
        parts = textwrap.wrap(
            printable(text), room, break_long_words=has_width(output()), break_on_hyphens=False
        )
        for part in parts or [""]:
            line(f"  {begin.ljust(width)}  {part}".rstrip())
            begin = ""
        last = label


def _show_last(label: str, text: str, *, width: int = _LABEL) -> None:
    # Users copy the folder, so do not wrap it.
    line(f"  {label.ljust(width)}  {printable(text)}")


def _side(side: str, old: Any, new: Any, *, shape: Any) -> str:
    """Describe one change; name memory formats instead of strides if these differ."""
    if side == "stride" and old is not None and new is not None:
        names = [" or ".join(satisfied(shape, stride)) or "no format" for stride in (old, new)]
        if names[0] != names[1]:
            return f"{names[0]} -> {names[1]}"
        return f"strides {_value(old)} -> {_value(new)}"
    return f"{_value(old)} -> {_value(new)}"


def _value(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
