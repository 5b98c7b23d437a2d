"""The document of an export: whether the artefact is right, what it takes, and how fast it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prepare.core.document import (
    Advice,
    Answer,
    Code,
    Document,
    Facts,
    Items,
    Part,
    ReportContext,
    Table,
    Text,
)
from prepare.core.utils.numbers import doubt, seconds, small, verdict_text
from prepare.core.utils.text import plural, printable, size
from prepare.core.utils.wording import as_python, words
from prepare.errors import PrepareError
from prepare.stages.export.exporter import EXPORTERS

if TYPE_CHECKING:
    from prepare.stages.export.records import Export, TakenOut


def export_document(shown: ReportContext) -> Document | None:
    """Return what is shown of the export of a run; None if it had none."""
    export = shown.found.get("export")
    if export is None:
        return None
    taken_out = tuple(map(_taken_out, export.taken_out))
    return Document(
        name="export",
        title="Exported",
        place=20,
        line="; inputs ".join(filter(None, (export_sentence(export), _layouts(export)))),
        head="exported",
        answers=(_answer(export),),
        advice=tuple(_advice(export)),
        rows=(("exported", export_sentence(export)),),
        parts=lambda: tuple(_parts(export, taken_out)),
        lead=tuple(_code(export)),
    )


def _code(export: Export) -> Iterator[Code]:
    """Yield the lines that load the artefact and call it with `batch`, or with a list of several inputs."""
    exporter: Any = None
    with suppress(PrepareError):  # one of another package, which is not installed here
        exporter = EXPORTERS[export.exporter]
    if export.status != "pass" or exporter is None:
        return
    contract = export.contract
    inputs = "[batch]" if len(contract.inputs) == 1 else "batch"
    changes = ".contiguous()" if contract.requires_contiguous else ""
    dtypes = {each.dtype for each in contract.inputs} & {"float16", "bfloat16"}
    if dtypes and not contract.formats_inputs:
        changes += f".to(torch.{dtypes.pop()})"
    if changes:
        inputs = f"[each{changes} for each in {inputs}]"
    if text := exporter.code(as_python(export.artefact), inputs):
        needs = " ".join(f"{key}={value}" for key, value in contract.environment.items())
        head = f"# Start your program with {needs}.\n" if needs else ""
        names = ", ".join(printable(each.name) for each in contract.inputs)
        head += f"# batch is the list [{names}].\n" if len(contract.inputs) > 1 else ""
        yield Code(text=f"{head}{text}", title="In your code")


def export_sentence(export: Export) -> str:
    """Return one sentence: `onnx pass: model.onnx, 1.2 MiB; largest error 3e-08, tolerance 1e-05`."""
    text = f"{export.exporter} {doubt(export.status)}"
    if export.artefact:
        text += f": {export.artefact}, {size(export.bytes)}"
    if export.status != "fail" and (worst := export.worst) is not None:
        text += f"; largest error {worst.error:.2g}, tolerance {worst.allowed:.2g}"
    return f"{text}; {export.reason}" if export.reason else text


def _answer(export: Export) -> Answer:
    kind, answer = {
        "pass": ("good", "Right as"),
        "fail": ("bad", "Wrong as"),
        "refused": ("bad", "Not exported to"),
        "cannot tell": ("warn", "Unclear if right as"),
    }[export.status]
    answer = f"{answer} {export.exporter}"
    remark = export.reason or f"{export.artefact}, {size(export.bytes)}"
    if "wrong" in export.contract.layouts.values():
        remark = f"inputs {_layouts(export)}"
    return Answer(
        "Exported",
        kind,
        answer,
        remark,
        line="; inputs ".join(filter(None, (export_sentence(export), _layouts(export)))),
    )


def _advice(export: Export) -> Iterator[Advice]:
    known = {
        "fail": (5, "bad", "Do not use the artefact", "the report has its answers"),
        "refused": (5, "bad", "Choose another format", "the report has the stage that failed"),
        "pass": (95, "good", f"Use {export.artefact}", "with the inputs that export.json lists"),
    }
    if export.status in known:
        rank, kind, answer, remark = known[export.status]
        if kind == "bad" and "float16" in export.recipe:
            other = words(cli="with precision=float32", python="without the step half")
            remark = f"or try it {other}; {remark}"
        yield Advice(rank, kind, answer, remark)


def _parts(export: Export, taken_out: tuple[str, ...]) -> Iterator[Part]:
    stages = ((s.name, doubt(s.status) + (f": {s.note}" if s.note else "")) for s in export.stages)
    rows = [("inputs", _layouts(export)), *stages, *(("taken out", text) for text in taken_out)]
    yield from (Text(text=f"{name}  {text}", where="terminal") for name, text in rows)
    yield Text(text=export_sentence(export), where="page")
    yield Facts(rows=tuple(_facts(export)), where="page")
    took = [
        (each.name, doubt(each.status), seconds(each.seconds), each.note) for each in export.stages
    ]
    yield _table("Stages of the export", "Stage Verdict #Time ~Note", took)
    checks = [
        (
            c.layout,
            c.size or c.batch or "",
            doubt(c.answer),
            doubt(c.status),
            small(c.error),
            small(c.allowed),
            c.note,
        )
        for c in export.checks
    ]
    titles = "Input #Batch Answer Verdict #Error #Tolerance ~Note"
    yield _table("Answers of the artefact in another process", titles, checks)
    inputs = [
        (
            each.name,
            f"[{', '.join('any' if length is None else str(length) for length in each.shape)}]",
            each.dtype,
            str(list(each.strides)),
        )
        for each in export.contract.inputs
    ]
    yield _table("Inputs that it takes", "Name Shape Type Strides", inputs)
    times = [
        (
            row.name,
            "" if row.seconds is None else seconds(row.seconds),
            verdict_text(row.verdict, row.ratio, row.ratio_interval),
        )
        for row in (export.time.rows if export.time else ())
    ]
    yield _table("Time of one call", "Variant #Time #Against", times)
    yield Items(texts=taken_out, title="Steps that do not go along", kind="note", where="page")


def _table(title: str, columns: str, rows: list[tuple]) -> Table:
    """Return a table; `#` before a column says that it holds numbers, `~` that it holds sentences."""
    kinds = {"#": "number", "~": "prose"}
    named = [(text.lstrip("#~"), kinds.get(text[0], "text")) for text in columns.split()]
    named[0] = (named[0][0], "head")
    return Table(label=title, title=title, columns=tuple(named), rows=rows, where="page")


def _facts(export: Export) -> Iterator[tuple[str, str]]:
    contract = export.contract
    formats = "converts its inputs to the dtype and memory format of the model"
    facts = [
        ("Artefact", f"{export.artefact}, {size(export.bytes)}" if export.artefact else ""),
        ("sha256", export.sha256),
        ("Versions", ", ".join(f"{name} {version}" for name, version in export.versions.items())),
        ("Inputs", formats if contract.formats_inputs else "takes its inputs as they are"),
        ("Contract", "give contiguous inputs only" if contract.requires_contiguous else ""),
        ("Recipe", "in the artefact" if export.recipe_inside else "beside the artefact only"),
        ("Environment", ", ".join(f"{key}={value}" for key, value in contract.environment.items())),
    ]
    return ((name, text) for name, text in facts if text)


def _layouts(export: Export) -> str:
    """Return the layouts of inputs by answer: `right: contiguous, channels_last; refused: gaps`."""
    answers: dict[str, list[str]] = {}
    for layout, answer in export.contract.layouts.items():
        answers.setdefault(doubt(answer), []).append(layout)
    parts = [f"{answer}: {', '.join(layouts)}" for answer, layouts in answers.items()]
    if export.contract.requires_contiguous:
        parts.append("give contiguous inputs only")
    return "; ".join(parts)


def _taken_out(item: TakenOut) -> str:
    """Return `repair_layout in 3 modules: this format chooses layouts itself`."""
    named = f" in {plural(len(item.modules), 'module')}" if item.modules else ""
    return f"{item.step}{named}: {item.reason}"
