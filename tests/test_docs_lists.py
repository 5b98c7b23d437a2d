"""Pages that explain words of the program: layers, statuses, checks, causes and files."""

import ast
import re
import tomllib

from paths import ROOT
from prepare.app.job.record import STATUSES as JOB_STATUSES
from prepare.app.job.record import shown_files
from prepare.app.report.sweep_table import SHARED
from prepare.app.sweep.summary import UNENDED
from prepare.audit import STATUSES as AUDIT_STATUSES
from prepare.stages.bench.records import VERDICTS
from prepare.stages.flow.torch_operators import CAUSES
from prepare.stages.tune.records import STATUSES as TUNE_STATUSES
from prepare.stages.verify.modules_alone import MODULE_KINDS
from prepare.stages.verify.records import STATUSES as VERIFY_STATUSES
from prepare.stages.verify.runs import KINDS


def layers() -> list[set[str]]:
    """Return the files in each row of the layer table, from the top down: `report/` or `plan.py`."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## The house")[2]
    rows = re.findall(r"^\| [a-z ]+ \| ((?:`[\w/.]+` ?)+) \|", text, re.MULTILINE)
    return [set(re.findall(r"`([\w/.]+)`", row)) for row in rows]


def test_every_file_is_in_the_layer_table_once():
    package = ROOT / "prepare"
    there = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    there |= {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert sorted(name for layer in layers() for name in layer) == sorted(there)


def test_the_layer_table_is_that_of_the_import_contracts():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rows = config["tool"]["importlinter"]["contracts"][0]["layers"]
    rules = [set(row.split(" : ")) for row in rows]
    assert [{name.strip("/").removesuffix(".py") for name in layer} for layer in layers()] == rules


def test_every_file_that_the_architecture_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = [
        file
        for file in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|yaml))`", text)
        if "conf/" not in file
    ]
    assert len(files) > 20
    assert [file for file in files if not (ROOT / "prepare" / file).is_file()] == []


def listed(page: str) -> set[str]:
    """Return the words in backticks in the first column of a page's tables."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    first = "".join(line.split("|")[1] for line in lines if line.startswith("|"))
    return {word.removesuffix("=") for word in re.findall(r"`([^`]+)`", first)}


def constants(folder: str, keyword: str) -> set[str]:
    """Return the strings that the calls in a folder's files pass for a keyword."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / folder).glob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    values = [given.value for call in calls for given in call.keywords if given.arg == keyword]
    return {value.value for value in values if isinstance(value, ast.Constant)}


def test_every_status_and_verdict_is_explained_on_its_page():
    statuses = {*JOB_STATUSES, *UNENDED, *AUDIT_STATUSES, *VERIFY_STATUSES, *TUNE_STATUSES}
    statuses |= {*VERDICTS, SHARED, "wrong"}
    assert sorted(statuses - listed("output.md")) == []


def test_every_check_of_a_verification_is_explained_on_its_page():
    checks = {*KINDS, *MODULE_KINDS, *constants("prepare/stages/verify", "what")}
    assert len(checks) > 8
    assert sorted(checks - listed("output.md")) == []


def test_every_cause_of_a_break_is_in_the_glossary():
    assert {"odd_stride", "conv3d_reference", "clone"} <= set(CAUSES)
    assert sorted(set(CAUSES) - listed("output.md")) == []


def test_every_file_of_a_run_is_explained_on_its_page():
    text = (ROOT / "docs" / "output.md").read_text()
    assert [file for file in sorted(shown_files()) if f"`{file}`" not in text] == []


def test_the_example_page_is_small_and_whole_as_its_picture_says():
    page = (ROOT / "docs" / "example" / "report.html").read_text()
    picture = (ROOT / "docs" / "pictures" / "run-terminal.svg").read_text()
    assert len(page) < 400_000
    assert set(re.findall(r'(?:href|src)="(.)', page)) <= {"#"}  # it needs no file beside it
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work)\b", page + picture) == []
    for said in ("18 of 18 convolutions", "at 17 places"):
        assert said in page
        assert said in picture.replace("\u00a0", " ")
