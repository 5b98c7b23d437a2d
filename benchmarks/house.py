"""Print the measures of the code by which its redesign was judged, for one or more trees.

    python benchmarks/house.py . ../base

docs/decisions/what-the-house-weighs.md says what was taken out. Nothing of a tree is imported.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from itertools import chain
from pathlib import Path
from typing import Any

# Words of `steps/` that mean something else elsewhere as well, in each part of the package.
_SHARED = {"device"}
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def main() -> None:
    """Print a table with a column for each tree that the command names."""
    columns = [measures(Path(tree).resolve()) for tree in sys.argv[1:] or ["."]]
    for name in columns[0]:
        print(f"{name:62}", *(f"{column[name]!s:>16}" for column in columns))


def measures(tree: Path) -> dict[str, Any]:
    """Return each measure of a tree by its name."""
    package, files = tree / "prepare", sorted((tree / "prepare").rglob("*.py"))
    tests = sorted((tree / "tests").rglob("*.py"))
    found: dict[str, Any] = {
        "code lines in prepare/": sum(map(code_lines, files)),
        "files in prepare/": len(files),
        "test code lines": sum(map(code_lines, tests)),
        "asserts": sum(isinstance(node, ast.Assert) for node in nodes(tests)),
        "asserts that compare a string of three or more words": sum(
            map(is_of_sentence, nodes(tests))
        ),
        "test files; those that import a module below a package": of(tests, imports_internals),
        "lines of docs/": sum(
            len(p.read_text().splitlines()) for p in (tree / "docs").rglob("*.md")
        ),
    }
    steps = {path.stem for path in (package / "steps").glob("[a-z]*.py")} - _SHARED
    outside = [path for path in files if not path.is_relative_to(package / "steps")]
    found["names of steps outside steps/, without device"] = places(outside, steps)
    for stage in ("patch", "contract", "tune"):
        folder = next(path for path in package.rglob(stage) if path.is_dir())
        others = [path for path in files if not path.is_relative_to(folder)]
        own = ".".join(folder.relative_to(tree).parts)
        named = [
            path
            for path in others
            if count(path, {stage}) or re.search(rf"{own}\b", path.read_text())
        ]
        found[f"files outside {stage}/ that name it"] = len(named)
    jobs = (package / "job").rglob("*.py")
    found["`task ==` in job/"] = sum(
        len(re.findall(r"task (==|!=|in )", p.read_text())) for p in jobs
    )
    found["functions that take all settings"] = sum(map(takes_settings, nodes(files)))
    graph = import_graph(package, files)
    found["circles of files, with imports in functions and for types"] = len(circles(graph))
    found["first level: folders, files"] = (
        f"{len([*package.glob('*/__init__.py')])}, {len([*package.glob('*.py')])}"
    )
    found["rooms, arrows between them"] = "{}, {}".format(*rooms(graph))
    return found


def code_lines(path: Path) -> int:
    """Count the lines with code: no blank line, comment or docstring."""
    with tokenize.open(path) as file:
        tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type not in _NO_CODE]
    lines = {line for t in tokens for line in range(t.start[0], t.end[0] + 1)}
    for node in nodes([path]):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def nodes(paths: list[Path]) -> chain[ast.AST]:
    """Return every node of the syntax trees of these files."""
    return chain.from_iterable(ast.walk(ast.parse(path.read_text())) for path in paths)


def of(paths: list[Path], is_one: Any) -> str:
    """Return how many files of tests there are, and of how many this is true."""
    tests = [path for path in paths if path.name.startswith("test_")]
    return f"{len(tests)}; {sum(map(is_one, tests))}"


def is_of_sentence(node: ast.AST) -> bool:
    """Return whether this is an assert that compares with a string of three or more words."""
    compared = ast.walk(node.test) if isinstance(node, ast.Assert) else ()
    strings = (
        each.value
        for comparison in compared
        if isinstance(comparison, ast.Compare)
        for each in ast.walk(comparison)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    )
    return any(
        len(re.findall("[A-Za-z]{2,}", text)) > 2 and " " in text.strip() for text in strings
    )


def imports_internals(path: Path) -> bool:
    """Return whether a file imports a module in a package, such as `prepare.stages.verify.metric`."""
    modules = (node.module or "" for node in nodes([path]) if isinstance(node, ast.ImportFrom))
    return any(
        re.match(r"prepare\.((stages|app)\.)?(?!(stages|app)\b)\w+\.", module) for module in modules
    )


def count(path: Path, words: set[str]) -> int:
    """Count the strings of a file that are one of these words."""
    return sum(isinstance(node, ast.Constant) and node.value in words for node in nodes([path]))


def places(paths: list[Path], words: set[str]) -> str:
    """Return `91 in 32`: the strings that are one of these words, and the files that hold them."""
    counts = [number for path in paths if (number := count(path, words))]
    return f"{sum(counts)} in {len(counts)}"


def takes_settings(node: ast.AST) -> bool:
    """Return whether a function has an argument `settings`."""
    if not isinstance(node, ast.FunctionDef):
        return False
    return "settings" in [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]


def import_graph(package: Path, files: list[Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports, in functions and for type checkers too."""
    modules = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in files
    }
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = [node for node in nodes([path]) if isinstance(node, ast.ImportFrom)]
        targets = {node.module or "" for node in found}
        targets |= {f"{node.module}.{alias.name}" for node in found for alias in node.names}
        graph[name] = (targets & modules.keys()) - {name}
    return graph


def rooms(graph: dict[str, set[str]]) -> tuple[int, int]:
    """Return how many folders and files there are at the first level, and how many import which."""
    parts = {name: name.split(".")[1] for name in graph}
    pairs = {(parts[name], parts[each]) for name, imported in graph.items() for each in imported}
    return len(set(parts.values())), len({(a, b) for a, b in pairs if a != b})


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other; a package itself is left out."""
    reached: dict[str, set[str]] = {}
    for name, imported in graph.items():
        seen, waiting = set[str](), [*imported]
        while waiting:
            each = waiting.pop()
            if each not in seen:
                seen.add(each)
                waiting += graph[each]
        reached[name] = seen
    found = {
        frozenset({other for other in reached[name] if name in reached[other]} | {name})
        for name in graph
        if name in reached[name]
    }
    return [set(each) for each in found]


if __name__ == "__main__":
    main()
