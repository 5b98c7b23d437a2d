"""For the site: takes off the fences what only the tests read (`no-run`, `output`)."""

import re
from typing import Any

_FENCE = re.compile(r"^```(\w+) (?:no-run|output)\b", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page as the site is to show it."""
    return _FENCE.sub(r"```\1", markdown)
