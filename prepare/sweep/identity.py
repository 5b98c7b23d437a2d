"""What determines the result of a job, as a short text: two jobs that have the same need to be done once."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

# How a job is run, and nothing of what comes out of it.
_HOW = ("isolate", "resume")
_LENGTH = 16


def identity(config: Mapping[str, Any], choices: Mapping[str, Any]) -> str:
    """Of a job with this resolved configuration, and these options chosen in the groups.

    It holds the configuration, the versions of torch, of prepare and of packages that bring steps, and
    the code of the model and of the plugins: the file that each is in, or every file of its package
    where that lies below the current folder. What those files import from elsewhere is not in it, and
    neither is the machine.
    """
    facts = {
        "config": {key: value for key, value in config.items() if key not in _HOW},
        "choices": dict(choices),
        "versions": _versions(),
        "code": {name: _code(name) for name in sorted({*_targets(config)})},
    }
    text = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_LENGTH]


def told_apart(identities: Iterable[str | None]) -> list[str | None]:
    """The same, but that no two are equal: a row that is asked for twice is two jobs."""
    seen: Counter[str | None] = Counter()
    found = []
    for one in identities:
        seen[one] += 1
        found.append(f"{one}-{seen[one]}" if one is not None and seen[one] > 1 else one)
    return found


def _versions() -> dict[str, str | None]:
    from_steps = {
        point.dist.name for point in metadata.entry_points(group="prepare.steps") if point.dist
    }
    return {name: _version(name) for name in sorted({"torch", "torch-prepare", *from_steps})}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _targets(config: Any) -> Iterator[str]:
    """The dotted names of what a configuration has imported."""
    if isinstance(config, Mapping):
        if isinstance(target := config.get("_target_"), str):
            yield target
        yield from (name for name in config.get("plugins") or () if isinstance(name, str))
        config = config.values()
    elif not isinstance(config, list):
        return
    for value in config:
        yield from _targets(value)


def _code(name: str) -> str | None:
    """A digest of the files that hold `name`, which are found without importing anything."""
    parts = name.split(".")
    for folder in map(Path, dict.fromkeys([Path.cwd(), *sys.path])):
        for length in range(len(parts), 0, -1):
            inner = folder.joinpath(*parts[:length])
            for file in (inner.with_suffix(".py"), inner / "__init__.py"):
                if file.is_file():
                    package = folder / parts[0]
                    whole = folder == Path.cwd() and package.is_dir()
                    return _digest(sorted(package.rglob("*.py")) if whole else [file])
    return None


def _digest(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        try:
            found.update(file.read_bytes())
        except OSError:
            continue
    return found.hexdigest()
