"""The pages: every block runs, and every link, file and test that a page names exists."""

import doctest
import re
import shlex
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hydra.core.config_store import ConfigStore

from doc_pages import PAGES, SKILL
from paths import ROOT
from prepare import recipe
from prepare.app.cli import main as cli
from prepare.pipeline import Pipeline
from prepare.stages.bench import time_prepared
from prepare.steps.device import Device
from small_nets import OPTIONAL

COMMANDS = ("python run.py", "prepare ")
# Packages that one page names, and no extra: where one is missing, the rest of that page is skipped.
RUNTIMES = ("onnxruntime", "openvino")
OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block: the words after the fence, its text, and the number of its first line.

    A block with a title is a file that the reader saves under that name.
    """

    info: list[str]
    text: str
    line: int
    title: str | None

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""

    @property
    def can_be_pasted(self) -> bool:
        """Return whether a reader can paste and run it."""
        return self.language in ("bash", "python") and not self.title and "no-run" not in self.info

    @property
    def is_command(self) -> bool:
        """Return whether all of its lines are commands of prepare, which this test runs too."""
        runs = all(line.startswith(COMMANDS) for line in self.commands)
        return self.language == "bash" and runs and self.can_be_pasted

    @property
    def commands(self) -> list[str]:
        """Return its lines, without the installation that stands before a command."""
        lines = self.text.splitlines()
        return [re.sub(r"^pip install [^&]* && ", "", line) for line in lines]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    result = []
    for match in _BLOCK.finditer(text):
        title = _TITLE.search(match[1])
        line = text.count("\n", 0, match.start(2)) + 1
        result.append(Block(match[1].split(), match[2], line, title and title[1]))
    return result


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Reader:
    """Follow a page as a reader would: in an empty folder, block after block."""

    def __init__(self, page: Path, folder: Path, capsys: pytest.CaptureFixture) -> None:
        self.page, self.folder, self.capsys = page, folder, capsys
        self.module = types.ModuleType("docs_page")
        self.printed = ""

    def follow(self, block: Block) -> None:
        if block.title:
            (self.folder / block.title).write_text(block.text)
        if block.language == "yaml" and block.text.startswith("format: prepare.recipe"):
            Pipeline.from_config(recipe.loads(block.text))
        elif "output" in block.info:
            self.compare(block)
        elif block.language == "python" and block.can_be_pasted:
            self.capsys.readouterr()
            # Empty lines before it, so that a traceback names the line of the page.
            source = "\n" * (block.line - 1) + block.text
            for package in (*OPTIONAL, *RUNTIMES):
                if re.search(rf"(from|import) {package}\b", source):
                    pytest.importorskip(package)
            exec(compile(source, str(self.page), "exec"), vars(self.module))
            self.printed = self.capsys.readouterr().out
        elif block.is_command:
            code = 3 if "exit=3" in block.info else 0
            self.printed = "".join(self.run(command, code) for command in block.commands)

    def run(self, command: str, expected: int) -> str:
        """Run a command, check its exit code, and return what it printed."""
        self.capsys.readouterr()
        code = cli.run(shlex.split(command)[2 if command.startswith("python") else 1 :])
        printed = self.capsys.readouterr()
        assert code == expected, f"{command}\n{printed.out}{printed.err}"
        return printed.out

    def compare(self, block: Block) -> None:
        # The pages show a machine without an accelerator, where `auto` means the CPU.
        here = block.text.replace("device cpu", f"device {Device().settle().device}")
        check = doctest.OutputChecker().check_output
        # A first line of dots may stand for nothing: whether there is a difference in speed is chance.
        texts = (block.text, here, here.removeprefix("...\n"))
        same = any(check(text, self.printed, OUTPUT) for text in texts)
        where = f"{page_id(self.page)}:{block.line}"
        assert same, f"{where} says\n{block.text}\nand what comes is\n{self.printed}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Enter an empty folder; afterwards forget modules imported from it and configs stored for Hydra."""
    before, stored = set(sys.modules), set(ConfigStore.instance().repo)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "104")
    # A page says that a run times something; how long it may take is tested elsewhere.
    monkeypatch.setattr(time_prepared, "BUDGET", 0.4)
    # With one thread torch takes another kernel for 1x1 convolutions, which gives another layout.
    torch.set_num_threads(2)
    yield tmp_path
    torch.set_num_threads(1)
    of_pages = set(ConfigStore.instance().repo) - stored - {"hydra"}  # its plugins are stored once
    for name in of_pages:
        del ConfigStore.instance().repo[name]
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def own_states():
    """Forget, before and after a page, what Accelerate keeps for the whole process."""

    def forget():
        if state := sys.modules.get("accelerate.state"):
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()

    forget()
    yield
    forget()


# Pages whose commands take long run in the full counts.
LONG = ("README", "sweeps", "exporting", "inference", "faster", "verification", "output", "frameworks", "layout",
        "precision")  # fmt: skip


def with_warnings(page: Path) -> object:
    """Return the page as a parameter; ignore warnings of other packages, and run long ones in the full counts."""
    marks = []
    if page.stem in ("frameworks", "exporting"):
        marks.append(pytest.mark.filterwarnings("ignore"))
    if page.stem in LONG:
        marks.append(pytest.mark.slow)
    return pytest.param(page, marks=marks)


@pytest.mark.usefixtures("own_states", "plugin")
@pytest.mark.parametrize("page", [*map(with_warnings, PAGES), SKILL], ids=page_id)
def test_a_page_runs_from_top_to_bottom(page, folder, monkeypatch, capsys):
    reader = Reader(page, folder, capsys)
    # Steps are dataclasses, which look their module up by name.
    monkeypatch.setitem(sys.modules, reader.module.__name__, reader.module)
    for block in blocks(page):
        reader.follow(block)


def test_the_code_of_the_readme_runs(folder, capsys):
    page = ROOT / "README.md"
    reader, code = Reader(page, folder, capsys), [b for b in blocks(page) if b.language == "python"]
    assert code
    for block in code:
        reader.follow(block)


def test_links_between_pages_lead_to_a_page_and_a_heading():
    broken = []
    for page in PAGES:
        links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
        for path, _, heading in (link.partition("#") for link in links):
            target = (page.parent / path) if path else page
            if not target.exists() or (heading and heading not in headings(target)):
                broken.append(f"{page_id(page)}: {path}#{heading}")
    assert broken == []


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", _BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in titles}


def test_every_file_that_a_page_names_exists():
    pattern = r"`((?:prepare|conf|tests|benchmarks)/[\w/.]+)`"
    named = {path: page_id(p) for p in PAGES for path in re.findall(pattern, p.read_text())}
    lacking = {path for path in named if "NAME" not in path and not (ROOT / path).exists()}
    assert {path: named[path] for path in lacking} == {}
