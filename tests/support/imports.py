"""The modules that a file imports."""

from __future__ import annotations

import ast
from pathlib import Path


def modules_imported_by(path: Path) -> set[str]:
    """The modules that a file imports, in functions and for type checkers too."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return imported
