"""Documents of records, as plain data: answers, advice, rows, notes and parts. Renderers draw them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from prepare.core.utils.text import Interval

# The kinds of bars: the baseline, better (smaller), worse (larger), not different, and invalid because its
# outputs are wrong. Each has a colour.
MARKS = ("baseline", "better", "worse", "same", "wrong")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: a value of at least 0, or None if it is not known; `text` is the formatted value."""

    label: str
    value: float | None
    interval: Interval = None
    text: str = ""
    mark: str = "same"


# Where a part is shown: everywhere, on pages, or in the terminal.
Where = Literal["", "page", "terminal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars from 0, one below the other."""

    title: str
    rows: tuple[Bar, ...]
    where: Where = "page"


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, its answer in a few words, and a remark.

    `kind` is `good`, `bad`, `warn` or `plain` (nothing to judge). `line` is the answer beside
    its question in a terminal, by default the answer and the remark. `section` is the anchor with the
    details, by default that of its document.
    """

    question: str
    kind: str
    answer: str
    remark: str = ""
    section: str = field(default="", kw_only=True)
    line: str = field(default="", kw_only=True)


# The questions of a run, and the labels of the answers in a terminal; what to do is the last.
LAYOUT, RIGHT, FASTER, NEXT = "Layout", "Right", "Faster", "Next"
# Answers beside which a recipe is not advised: the two words of doubt, and no convolution in the layout.
UNDECIDED = UNCLEAR, NOT_MEASURED, NEVER_TAKEN = "Unclear", "Not measured", "Never taken"


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice; of all that a run gives, the one with the lowest `rank` is shown as what to do."""

    rank: int
    kind: str
    answer: str
    remark: str = ""
    section: str = field(default="", kw_only=True)


USE_RECIPE = Advice(100, "good", "Use the recipe", "in your code", section="reproduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A paragraph, or several sentences as a list. `kind` is empty, or `note` for small print; of a list
    also `issues` or `wrong`, whose `title` is the remedy.
    """

    text: str | tuple[str, ...]
    title: str = ""
    kind: str = ""
    where: Where = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names and values."""

    rows: tuple[tuple[str, str], ...]
    title: str = ""
    where: Where = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table. Each column is a title and a kind: `head` or `name` (as code) for what a row is about, `link`
    if it also has an address, `word` for a status, `code`, `number`, `prose` or `text`.

    `label` names it for screen readers, `title` heads it. `file` has all rows, if there are too many. `most`
    is the number of rows that a terminal prints, `noun` what a row is; `links` are the addresses of the rows,
    empty for none. `form` is empty, `narrow`, or `stacked` if a phone shows the cells of a row below each
    other.
    """

    label: str
    columns: tuple[tuple[str, str], ...]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    file: str = ""
    most: int = 10
    noun: str = "row"
    links: Sequence[str] = ()
    form: str = ""
    where: Where = ""


def columns(text: str) -> tuple[tuple[str, str], ...]:
    """Return the columns of a table: `columns("Model head, Peak memory number")`, titles and kinds."""
    return tuple((title, kind) for title, _, kind in (c.rpartition(" ") for c in text.split(", ")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Text to copy: `title` heads it. Of a longer one than `most` letters a page leaves out the middle."""

    text: str
    title: str = ""
    most: int = 0
    where: Where = "page"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Parts that a page hides behind the line `title`."""

    title: str
    parts: tuple[Part, ...]
    where: Where = "page"


# The five parts of a document, and one that hides some of them.
Part = Text | Facts | Table | Bars | Code | Folded
Row = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """All that is shown of one stage of a run, or of one record.

    Attributes:
        name: the anchor of its section.
        title: the heading of its section; empty if it has none.
        place: sections are in this order on a page.
        line: the record in one sentence.
        head: what stands before the sentence in the terminal: `verify (short)`.
        answers: answers to questions, for the first screen. Of two answers to the same question that of the
            document with the lower `place` is shown.
        advice: what to do.
        notes: sentences that end the summary.
        parts: a function that returns the parts of the section.
    """

    name: str
    title: str = ""
    place: int = 100
    line: str = ""
    head: str = ""
    answers: tuple[Answer, ...] = ()
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    parts: Callable[[], Iterable[Part]] = tuple

    def __post_init__(self) -> None:
        if self.title:
            for key in ("answers", "advice"):
                given = getattr(self, key)
                own = (each if each.section else replace(each, section=self.name) for each in given)
                object.__setattr__(self, key, tuple(own))

    def shown(self, where: Where) -> Iterable[Part]:
        """Return the parts for `page` or `terminal`."""
        return (part for part in self.parts() if part.where in ("", where))


@dataclass(frozen=True, kw_only=True)
class ReportContext:
    """The sources of documents: the records of a run, or a single record.

    Attributes:
        found: the records by name.
        ran: the names of the stages that the run had, whether or not they left a record; None for records
            without a run.
        audit: the audit of the model; None if it was not prepared.
        unchanged: whether the pipeline changed nothing, so that nothing was verified or timed.
        stopped: whether the run was stopped before its end.
        has_example: whether there was an input to call the model with.
        folder: the folder of the run, as a user writes it; empty if there is none.
        elsewhere: the end of a sentence: where the convolutions are that no forward met.
    """

    found: Mapping[str, Any]
    ran: tuple[str, ...] | None = None
    audit: Any = None
    unchanged: bool = False
    stopped: bool = False
    has_example: bool = True
    folder: str = ""
    elsewhere: str = ""

    def without(self, stage: str) -> str:
        """Return why there is no record of `stage`: `verify=none`, `stopped before`, or what to give."""
        if self.stopped:
            return "stopped before"
        if not self.has_example:
            return "no example input"
        return f"{stage}=none"

    def had(self, stage: str) -> bool:
        """Return whether a prepared model was to go through `stage`."""
        return self.ran is not None and stage in self.ran and self.audit is not None


# The reason of a run whose pipeline changes neither the model nor its example.
UNCHANGED = "nothing was changed, so there is nothing to verify or time"
