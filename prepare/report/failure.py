"""The answers of a page of a job that failed: what went wrong, where, when, and what to do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prepare.core.document import Answer
from prepare.core.utils.text import capitalized, first_line, plural

if TYPE_CHECKING:
    from prepare.job.record import Result

# The line of the user's code in front of an error: `my_nets.py:8, in forward: ValueError: ...`.
_PLACE = re.compile(r"(?:^|.*?: )(?P<file>\S+:\d+)(?:, in (?P<function>[^\s:]+))?: (?P<rest>.*)")
_WORDS = {
    "model": "The model raised",
    "step": "A step raised",
    "error": "An exception",
    "oom": "Out of memory",
    "exit": "sys.exit was called",
    "file": "A file",
    "weights": "The weights",
    "configuration": "The configuration",
    "known issue": "A known issue",
}
_SECTION = "failure"


def failure_answers(result: Result) -> list[Answer]:
    """Return what went wrong; and where, when, and what to do, as far as they are known."""
    line = first_line(result.error or "")
    place = _PLACE.match(line)
    wrong, separator, remedy = line.rpartition("; ")
    # Errors of this package end with a remedy; those of other code may have a semicolon anywhere.
    ours = bool(separator) and not place
    if result.status == "interrupted":
        advice = "Run the command again"
    elif ours:
        advice = capitalized(remedy) if remedy else ""
    elif result.reason == "oom":
        advice = "Use a smaller input or model"
    else:
        advice = "Correct that line" if place else "Read the traceback"
    text = place["rest"] if place else wrong if ours else line
    answers = [("What went wrong?", "bad", failure_word(result), text)]
    if place:
        answers.append(("Where?", "plain", place["file"], _in(place["function"])))
    if result.during:
        done = f"after {plural(len(result.done), 'completed stage')}" if result.done else ""
        answers.append(("When?", "plain", f"While {result.during}", done))
    if advice:
        answers.append(("What to do?", "warn", advice, ""))
    return [
        Answer(question=question, kind=kind, answer=answer, remark=remark, section=_SECTION)
        for question, kind, answer, remark in answers
    ]


def failure_word(result: Result) -> str:
    """Return the kind of failure in a few words: `The model raised`."""
    reason = (result.reason or result.status).replace("_", " ")
    return _WORDS.get(reason, capitalized(reason))


def _in(function: str | None) -> str:
    return f"in {function}" if function else ""
