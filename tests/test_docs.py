"""The pages hold what they promise: every block runs from top to bottom, every link and test exists."""

import ast
import doctest
import re
import shlex
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from prepare import recipe
from prepare.pipeline import Pipeline

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
COMMANDS = ("python run.py", "prepare ")

_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_TITLE = re.compile(r'title="([^"]+)"')
_NAMED_TEST = re.compile(r"`(?:tests/)?(test_\w+\.py)::(\w+)`")


@dataclass(frozen=True)
class Block:
    """One fenced block: the words after the fence, its text, and the line where that begins."""

    info: list[str]
    text: str
    line: int
    title: str | None

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""

    @property
    def runs(self) -> bool:
        """Whether the text of a bash block is a command of ours, and not marked otherwise."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        ours = all(line.startswith(COMMANDS) for line in lines)
        return self.language == "bash" and ours and "no-run" not in self.info


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        title = _TITLE.search(match[1])
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(match[1].split(), match[2], line, title and title[1]))
    return found


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_command(line: str, folder: Path) -> str:
    """What the command printed; it has to end well."""
    words = shlex.split(line, comments=True)
    words = words[2:] if words[0] == "python" else words[1:]
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *words],
        capture_output=True, text=True, cwd=folder, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


class Reader:
    """Follows a page as its reader would: in an empty folder, block after block."""

    def __init__(self, page: Path, folder: Path, capsys: pytest.CaptureFixture) -> None:
        self.page, self.folder, self.capsys = page, folder, capsys
        self.module = types.ModuleType("docs_page")
        self.printed = ""

    def follow(self, block: Block) -> None:
        if block.title:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        if block.language == "python" and not block.title:
            self.python(block)
        elif block.runs:
            self.printed = "".join(
                run_command(line, self.folder) for line in block.text.splitlines()
            )
        elif block.language == "yaml" and block.text.startswith("format: prepare.recipe"):
            Pipeline.from_config(recipe.loads(block.text))
        elif "output" in block.info:
            same = doctest.OutputChecker().check_output(block.text, self.printed, OUTPUT)
            where = f"{page_id(self.page)}:{block.line}"
            assert same, f"{where} says\n{block.text}\nand what comes is\n{self.printed}"

    def python(self, block: Block) -> None:
        # Empty lines before it, so that a traceback names the line of the page.
        source = "\n" * (block.line - 1) + block.text
        self.capsys.readouterr()
        exec(compile(source, str(self.page), "exec"), vars(self.module))  # noqa: S102
        self.printed = self.capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys, plugin):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    reader = Reader(page, tmp_path, capsys)
    # Steps are dataclasses, which look their module up by name.
    monkeypatch.setitem(sys.modules, reader.module.__name__, reader.module)
    for block in blocks(page):
        reader.follow(block)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_between_pages_exist(page):
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_test_that_a_page_names_exists(page):
    named = set(_NAMED_TEST.findall(page.read_text()))
    missing = [f"{file}::{test}" for file, test in sorted(named) if test not in functions(file)]
    assert missing == []


def functions(file: str) -> set[str]:
    path = ROOT / "tests" / file
    if not path.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "name")}


def test_every_pitfall_names_a_test():
    sections = re.split(r"^### ", (ROOT / "docs" / "pitfalls.md").read_text(), flags=re.MULTILINE)[1:]
    without = [part.splitlines()[0] for part in sections if not _NAMED_TEST.search(part)]
    assert len(sections) > 30
    assert without == []


def test_every_page_is_reachable_from_the_readme():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen:
            seen.add(page)
            links = [link.partition("#")[0] for link in _LINK.findall(page.read_text())]
            waiting += [(page.parent / link).resolve() for link in links if link.endswith(".md")]
    assert [page_id(page) for page in PAGES if page.resolve() not in seen] == []


def test_every_page_begins_with_something_that_runs():
    first = {page: (blocks(page) or [None])[0] for page in PAGES[1:] if page.name != "benchmarks.md"}
    runs = {page for page, block in first.items() if block and (block.runs or block.language == "python")}
    assert [page_id(page) for page in first if page not in runs] == []


def test_the_readme_begins_with_the_two_commands():
    first, second = [block.text for block in blocks(ROOT / "README.md") if block.language == "bash"][:2]
    assert first.startswith("pip install -c constraints.txt")
    assert first.endswith("&& python run.py model=unet3d memfmt=channels_last_3d\n")
    assert second == "pytest\n"
    assert (ROOT / "constraints.txt").is_file()


def test_every_step_and_every_page_of_the_documentation_is_named_somewhere():
    from prepare.registry import STEPS

    text = "\n".join(page.read_text() for page in PAGES)
    ours = [name for name in STEPS if STEPS[name].__module__.startswith("prepare.steps.")]
    assert [name for name in ours if f"`{name}`" not in text] == []
