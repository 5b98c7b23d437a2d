"""The pytest fixture `layout_contract`: hold a model to its layout contract in a test.

Nothing of torch, and nothing else of this package, is imported unless a test uses the fixture.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_KEY = "layout_contract"
_FOLDER = "contracts"
_UPDATE = "pytest --prepare-update"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("prepare", "layout contracts of torch-prepare")
    group.addoption(
        "--prepare-update", action="store_true", help="write the layout contracts of today's models"
    )
    group.addoption(
        "--prepare-summary", metavar="FILE", help="write all checks of contracts as Markdown"
    )


@pytest.fixture
def layout_contract(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Return a function that checks a model: `layout_contract(model, batch, recipe)`.

    It seeds torch for the test, so that each run builds the same model and batch.

    It takes the arguments of `prepare.stages.contract.record`, and `file`, the path of the contract: by
    default `contracts/NAME.yaml` beside the test. A broken contract fails the test; `--prepare-update` writes
    it. It returns the `ContractCheck`.
    """
    import torch

    names: list[str] = []

    def check(
        model: Any,
        batch: Any,
        recipe: Any = None,
        *,
        file: str | Path | None = None,
        **options: Any,
    ) -> Any:
        path = Path(file) if file is not None else _default_file(request, len(names))
        names.append(str(path))
        return _check(request, path, (model, batch, recipe), options)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what contracts could be tightened, and write the Markdown of `--prepare-summary`."""
    found: dict[str, Any] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, value in getattr(report, "user_properties", ()):
                if key == _KEY:
                    found |= json.loads(value)
    file = terminalreporter.config.getoption("--prepare-summary")
    if not found and not file:
        return
    better = [name for name, result in found.items() if result["status"] == "better"]
    if better:
        terminalreporter.section("layout contracts")
        for name in better:
            terminalreporter.write_line(f"{name}: better than its contract; tighten it: {_UPDATE}")
    if file:
        from prepare.core.utils import files
        from prepare.stages.contract.summary import page

        files.write_text(file, page(found.values()))


def _check(
    request: pytest.FixtureRequest,
    path: Path,
    given: tuple[Any, Any, Any],
    options: dict[str, Any],
) -> Any:
    from prepare.stages.contract import Contract, record
    from prepare.stages.contract.compare import compare
    from prepare.stages.contract.summary import check_lines, markdown

    name = _shown(path, request.config.rootpath)
    update = request.config.getoption("--prepare-update")
    if not path.is_file() and not update:
        pytest.fail(f"there is no contract at {name}; write it: {_UPDATE}", pytrace=False)
    known = Contract.load(path) if path.is_file() else None
    options = {"threads": known.threads if known else None} | options
    today = record(*given, **options)
    result = compare(known or today, today)
    if update and (known is None or result.changes):
        path.parent.mkdir(parents=True, exist_ok=True)
        today.save(path)
        result = compare(today, today)
    text = "\n".join(check_lines(result, file=name, update=_UPDATE))
    told = {name: {"status": result.status, "text": markdown(name, result)}}
    request.node.user_properties.append((_KEY, json.dumps(told)))
    request.node.add_report_section("call", "layout contract", text)
    if result.status == "broken":
        pytest.fail(text, pytrace=False)
    return result


def _default_file(request: pytest.FixtureRequest, number: int) -> Path:
    """Return the file of a test; names of parameters may hold any character."""
    name = re.sub(r"[^\w.-]+", "-", request.node.name).strip("-")
    module = request.path.stem
    return (
        request.path.parent / _FOLDER / f"{module}-{name}{f'-{number + 1}' if number else ''}.yaml"
    )


def _shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
