"""Hooks of the site: drop fence words that only the tests read, and keep decisions out of the search."""

import re
from typing import Any

_FENCE = re.compile(r"^```(\w+) (?:no-run|output)\b", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the Markdown of a page without the fence words."""
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"exclude": True}
    return _FENCE.sub(r"```\1", markdown)
