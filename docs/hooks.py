"""Hooks of the site: fence words of the tests, pictures, files beside docs/, guides first in the search."""

import re
from typing import Any

_FENCE = re.compile(r"^```(\w+) (?:no-run|output)\b", re.MULTILINE)
_PICTURE = re.compile(r"!\[([^\]]+)\]\(([^)\s]*pictures/[\w-]+)-light\.webp\)")
_BESIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(benchmarks/[^)\s]+)\)")
_BOOSTS = {"reference/": 0.1, "faq": 2, "quickstart": 2}  # in the search a guide comes first
_BOTH = "".join(
    rf'[![\1](\2-{name}.webp#only-{name})](\2-{name}.webp){{ .picture title="Full size" }}'
    for name in ("light", "dark")
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the Markdown of a page without the fence words, with a dark picture beside each light one.

    A link to a file of `benchmarks/`, which is not on the site, becomes the name of the file.
    """
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"exclude": True}
    for start, boost in _BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    return _BESIDE.sub(r"\1 (`\2`)", _PICTURE.sub(_BOTH, _FENCE.sub(r"```\1", markdown)))
