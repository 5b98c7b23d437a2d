"""The house stays as it is drawn: which file may import which, and what an import pays for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import prepare

ROOT = Path(prepare.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Imported while a module loads, by what each layer may never load.
LOWEST = {"prepare.errors", "prepare.layout"}
KNOW_HYDRA = ("flags.py", "hydra.py", "task.py", "composing.py", "composed.py")


def imports(path: Path, *, at_load: bool = False) -> set[str]:
    """The modules that a file imports; with `at_load`, only those it imports while it loads."""
    tree = ast.parse(path.read_text())
    found = set()
    nodes = ast.walk(tree) if not at_load else _loading(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def _loading(tree: ast.Module):
    """The nodes that run on import: not the bodies of functions, not what only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        yield node
        yield from _loading(node)


def package(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_opens_with_one_sentence(path):
    summary = ast.get_docstring(ast.parse(path.read_text())).split("\n")[0]
    assert summary.endswith(".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_command_line_knows_hydra(path):
    if path.name not in KNOW_HYDRA:
        assert not {"hydra", "omegaconf"} & package(imports(path))


def test_the_audit_knows_no_step_and_no_pipeline():
    files = (
        "audit.py",
        "rows.py",
        "reading.py",
        "tensors.py",
        "computed.py",
        "tree.py",
        "layout.py",
    )
    for name in files:
        known = imports(ROOT / name, at_load=True) | imports(ROOT / name) - {"prepare.plan"}
        known = {name for name in known if name.startswith("prepare.")}
        for forbidden in ("pipeline", "step", "steps", "registry", "asking", "wants", "transfer"):
            assert not any(name.split(".")[1] == forbidden for name in known), (name, forbidden)


def test_the_pipeline_knows_no_audit_and_no_record():
    for name in (
        "pipeline.py",
        "plan.py",
        "asking.py",
        "wants.py",
        "transfer.py",
        "step.py",
        "registry.py",
    ):
        for forbidden in ("audit", "record", "cli", "hydra", "report"):
            assert f"prepare.{forbidden}" not in imports(ROOT / name), (name, forbidden)


def test_applying_loads_no_compiler_and_no_distributed_training():
    # Either costs more than a second, and most of the time of a first `apply`.
    script = (
        "import sys\nimport torch\nfrom torch import nn\nfrom prepare.pipeline import Pipeline\n"
        "steps = {'half': {}, 'conv3d_memory_format': {}, 'repair_layout': {}, 'input_format': {}}\n"
        "model = nn.Sequential(nn.Conv3d(2, 2, 3), nn.InstanceNorm3d(2))\n"
        "Pipeline.from_config(steps).apply(model)\n"
        "slow = {'torch._dynamo', 'torch.distributed.fsdp', 'torch._inductor', 'sympy'}\n"
        "print(sorted(slow & set(sys.modules)))\n"
    )
    assert run(script) == "[]"


def test_the_report_knows_no_torch():
    for path in (ROOT / "report").rglob("*.py"):
        assert not {"torch", "hydra", "omegaconf"} & package(imports(path)), path


def test_steps_load_without_torch():
    free = ["errors", "layout", "options", "patterns", "step", "registry", "recipe", "plain_yaml",
            "scalars", "files", "audit"]  # fmt: skip
    for path in [*(ROOT / f"{name}.py" for name in free), *(ROOT / "steps").glob("*.py")]:
        assert "torch" not in package(imports(path, at_load=True)), path


def test_the_lowest_files_import_nothing_of_ours():
    for name in LOWEST:
        path = ROOT / f"{name.split('.')[1]}.py"
        assert not {found for found in imports(path) if found.startswith("prepare")}


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    return done.stdout.strip()


def test_training_code_imports_neither_hydra_nor_omegaconf_nor_the_audit():
    code = (
        "import sys, prepare.pipeline as p; p.Pipeline.from_config({'half': {}}).to_config(); "
        "print([m for m in ('hydra', 'omegaconf', 'rich', 'prepare.audit', 'jinja2') if m in sys.modules])"
    )
    # jinja2 comes with torch, which may load it of its own accord.
    assert run(code) in ("[]", "['jinja2']")


def test_steps_are_listed_and_checked_without_torch():
    code = (
        "import sys; from prepare.registry import STEPS; "
        "[STEPS[name].from_options({}) for name in STEPS]; print('torch' in sys.modules)"
    )
    assert run(code) == "False"


def test_prepare_itself_imports_nothing():
    assert imports(ROOT / "__init__.py") == set()
