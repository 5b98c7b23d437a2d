"""Hooks of the site: generated parts, fence words of the tests, pictures, guides first in the search."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^```(\w+) (?:no-run|output|exit=3)\b", re.MULTILINE)
_PICTURE = re.compile(r"!\[([^\]]+)\]\(([^)\s]*pictures/[\w-]+)-light\.webp\)")
_BESIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(benchmarks/[^)\s]+)\)")
_GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
# What a page shows of the program itself: the words of a command, whose output stands in the page.
_COMMANDS = {"help": ("--help", "all"), "steps": ("steps",)}
_BOOSTS = {"reference": 0.1, "quickstart": 2}  # in the search a guide comes first
_BOTH = "".join(
    rf'[![\1](\2-{name}.webp#only-{name})](\2-{name}.webp){{ .picture title="Full size" }}'
    for name in ("light", "dark")
)


def on_post_build(config: Any, **_: Any) -> None:
    """Write `llms.txt`: the guides in the navigation, each with its first sentence."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for section in config["nav"]:
        ((title, pages),) = section.items()
        names = [page if isinstance(page, str) else next(iter(page.values())) for page in pages]
        guides = [name for name in names if isinstance(name, str) and name != "decisions.md"]
        lines += [
            "",
            f"## {title}",
            "",
            *(_described(Path(config["docs_dir"]), name) for name in guides),
        ]
    (Path(config["site_dir"]) / "llms.txt").write_text("\n".join([*lines, ""]))


def _described(docs: Path, name: str) -> str:
    page = re.sub(r"\A---\n.*?\n---\n+", "", (docs / name).read_text(), flags=re.DOTALL)
    title, text, *_ = page.split("\n\n", 2)
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(text.split()))
    address = name.removesuffix("index.md").replace(".md", "/") or "."
    return f"- [{title.lstrip('# ')}]({address}): {re.split(r'(?<=[.?]) ', plain)[0]}"


def _printed(*words: str) -> str:
    command = [sys.executable, "-m", "prepare", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the Markdown of a page without the fence words, with a dark picture beside each light one.

    A link to a file of `benchmarks/`, which is not on the site, becomes the name of the file, and a comment
    `<!-- generated: NAME -->` the output of that command.
    """
    markdown = _GENERATED.sub(lambda name: f"```text\n{_printed(*_COMMANDS[name[1]])}```", markdown)
    if page.file.src_uri == "decisions.md":
        page.meta["search"] = {"exclude": True}
    for start, boost in _BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    return _BESIDE.sub(r"\1 (`\2`)", _PICTURE.sub(_BOTH, _FENCE.sub(r"```\1", markdown)))
