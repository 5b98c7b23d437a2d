"""An answer at the top of a page."""

from __future__ import annotations

from dataclasses import dataclass

# The kinds of answers; a page gives each a colour and an icon.
KINDS = ("good", "bad", "warn", "plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question, its answer in a few words, and a remark; `section` is the anchor with the details.

    `kind` is `good`, `bad`, `warn` or `plain` (nothing to judge).
    """

    question: str
    kind: str
    answer: str
    remark: str = ""
    section: str = ""
