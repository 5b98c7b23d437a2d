"""The house: which folder may import which, what an import costs, and how things are named."""

import ast
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

import prepare
from imports import modules_imported_by
from prepare.registry import STEPS

ROOT = Path(prepare.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
CEILINGS = Path(__file__).with_name("house.toml")
STAGES = sorted(path.parent.name for path in ROOT.glob("stages/*/stage.py"))
PUBLIC = (
    "audit", "checkpoint", "errors", "frameworks/hydra", "patterns", "pipeline", "pipeline/distributed",
    "recipe", "registry", "stages/bench", "stages/flow",
    "stages/stage", "stages/tune", "stages/verify", "step",
)  # fmt: skip


def files_of(part: str) -> list[Path]:
    return [ROOT / part] if part.endswith(".py") else sorted((ROOT / part).rglob("*.py"))


def is_within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def code_lines(path: Path) -> int:
    """Count the lines with code: no blank line, comment or docstring."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    no_code |= {tokenize.ENCODING, tokenize.ENDMARKER}
    with path.open("rb") as file:
        tokens = [t for t in tokenize.tokenize(file.readline) if t.type not in no_code]
    texts = (
        range(node.lineno, node.end_lineno + 1)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    lines = chain.from_iterable(range(t.start[0], t.end[0] + 1) for t in tokens)
    return len(set(lines) - set(chain.from_iterable(texts)))


def room_of(path: Path, rooms: dict[str, int]) -> str:
    """Return the room that holds a file of the package: the longest name that the path begins with."""
    name = path.relative_to(ROOT).as_posix()
    return max((room for room in rooms if f"{name}/".startswith(f"{room}/")), key=len, default=".")


def measures() -> dict[str, int]:
    """Return what house.toml limits: the code lines of each room, and the sums."""
    rooms = tomllib.loads(CEILINGS.read_text())["rooms"]
    lines = Counter(dict.fromkeys(rooms, 0))
    for path in FILES:
        lines[room_of(path, rooms)] += code_lines(path)
    top = ROOT.parent
    pages = [path.read_text() for path in top.glob("docs/**/*.md")]
    sums = {
        "prepare": sum(lines.values()),
        "files": len(FILES) + len([*top.glob("hydra_plugins/*.py"), *top.glob("run.py")]),
        "templates": sum(len(p.read_text().splitlines()) for p in ROOT.rglob("templates/*")),
        "tests": sum(map(code_lines, top.glob("tests/**/*.py"))),
        "words": sum(len(page.split()) for page in pages),
    }
    return {**lines, **sums}


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    return done.stdout.strip()


def test_no_room_is_above_its_ceiling():
    ceilings = tomllib.loads(CEILINGS.read_text())
    limits, found = {**ceilings["rooms"], **ceilings["sums"]}, measures()
    table = [f"{name:16} {found[name]:6} of {limit}" for name, limit in limits.items()]
    above = [name for name, limit in limits.items() if found[name] > limit]
    assert not above, "\n".join([f"above the ceiling: {', '.join(above)}", *table])


def test_a_file_opens_with_one_sentence():
    summaries = {p: ast.get_docstring(ast.parse(p.read_text())).split("\n")[0] for p in FILES}
    assert [path for path, text in summaries.items() if not text.endswith(".")] == []


def test_no_two_classes_have_the_same_name():
    nodes = (node for path in FILES for node in ast.parse(path.read_text()).body)
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in counts.items() if count > 1] == []


def test_code_that_is_compiled_has_no_union_in_isinstance():
    """Dynamo of torch 2.5 cannot trace `isinstance(x, list | tuple)`."""
    files = [*files_of("steps/repairs"), *files_of("steps/keeping/operators.py")]
    assert not [path for path in files if re.search(r"isinstance\([^()]*\|", path.read_text())]


def test_every_import_keeps_to_the_contracts_of_pyproject():
    pytest.importorskip("importlinter", reason="needs import-linter")
    # In a process of its own: it sets the loggers of its process.
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_what_is_read_without_torch_loads_no_torch():
    """The face, the helpers, the public modules, the report, and what each step and stage declares."""
    declared = [p for n in ("stage", "document", "records") for p in ROOT.glob(f"stages/*/{n}.py")]
    assert len(declared) >= 2 * len(STAGES)
    public = [
        path for name in PUBLIC for path in (ROOT / f"{name}.py", ROOT / name / "__init__.py")
    ]
    paths = [*public, *files_of("core/utils"), *files_of("app/report"), *declared]
    names = [path.relative_to(ROOT.parent).with_suffix("").parts for path in paths if path.exists()]
    assert len(names) > len(PUBLIC)
    script = (
        "import importlib, sys, prepare; dir(prepare); prepare.__version__\n"
        "from prepare.registry import STEPS; [STEPS[name].from_options({}) for name in STEPS]\n"
        f"for name in {['.'.join(name).removesuffix('.__init__') for name in names]}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(name)\n"
    )
    assert run(script) == ""


# The stage that no part outside of its own folder has to know.
UNNAMED = {"tune"}


def words_in(part: str, words: set[str]) -> set[str]:
    """Return the places of a part where one of these words is a string of its own."""
    return {
        f"{path.relative_to(ROOT)}:{node.lineno}:{node.col_offset}: {node.value}"
        for path in files_of(part)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in words
    }


@pytest.mark.parametrize("part", ["app/cli", "app/job", "app/report", "app/sweep", "core"])
def test_no_part_names_a_stage(part):
    assert set(STAGES) > UNNAMED
    assert words_in(part, UNNAMED) == set()


# Other things have these names too: groups of the configuration, an option of one, and a figure. The check of
# precision=float32 asks for the step.
SHARED = {"device", "compile", "half", "flow"}


@pytest.mark.parametrize("part", ["app/sweep", "app/job"])
def test_what_runs_stages_and_steps_knows_none_of_them(part):
    assert words_in(part, {*STAGES, *STEPS} - SHARED) == set()


def test_no_private_name_is_used_in_another_folder():
    found = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path in FILES
        for module in modules_imported_by(path)
        if is_within(module, {"prepare"}) and re.search(r"\._[a-z]", module)
        if path.parent not in (ROOT.parent / module.replace(".", "/")).parents
    }
    assert found == set()


def test_applying_loads_no_compiler_and_no_distributed_training():
    # Either takes more than a second to import, most of the time of a first `apply`.
    script = (
        "import sys\nimport torch\nfrom torch import nn\nfrom prepare.pipeline import Pipeline\n"
        "steps = {'half': {}, 'conv3d_memory_format': {}, 'repair_layout': {}, 'input_format': {}}\n"
        "model = nn.Sequential(nn.Conv3d(2, 2, 3), nn.InstanceNorm3d(2))\n"
        "Pipeline.from_config(steps).apply(model)\n"
        "slow = {'torch._dynamo', 'torch.distributed.fsdp', 'torch._inductor', 'sympy'}\n"
        "print(sorted(slow & set(sys.modules)))\n"
    )
    assert run(script) == "[]"
