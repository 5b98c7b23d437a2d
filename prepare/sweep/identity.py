"""The identity of a job: a digest of all that determines its result, so that it is executed only once."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from prepare.core.utils.accelerator import installed_accelerator

# Options that change how a job is executed, not its result.
_WITHOUT_EFFECT = ("isolate", "resume", "overwrite")
_LENGTH = 16


def identity(config: Mapping[str, Any], choices: Mapping[str, Any]) -> str:
    """Return the identity of a job with this resolved configuration and these choices in the groups.

    It covers the configuration, the versions of torch, prepare and packages that register steps, and
    the code of the model and of the plugins: the file of each, or every file of its package if that is
    in the current folder, and the accelerator: CUDA, cuDNN, driver, architectures, HIP, macOS. It does
    not cover other files that this code imports, or the processor.
    """
    facts = {
        "config": {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT},
        "choices": dict(choices),
        "versions": _versions(),
        "accelerator": installed_accelerator(),
        "code": {name: _code(name) for name in sorted({*_targets(config)})},
    }
    text = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_LENGTH]


def number_duplicates(identities: Iterable[str | None]) -> list[str | None]:
    """Number equal identities, so that a duplicate row is a second job."""
    counts: Counter[str | None] = Counter()
    distinct = []
    for name in identities:
        counts[name] += 1
        distinct.append(f"{name}-{counts[name]}" if name is not None and counts[name] > 1 else name)
    return distinct


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
    """Yield the dotted names that a configuration imports."""
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
    """Return a digest of the files that define `name`, found without an import."""
    parts = name.split(".")
    for folder in dict.fromkeys([Path.cwd(), *map(Path, sys.path)]):
        for length in range(len(parts), 0, -1):
            inner = folder.joinpath(*parts[:length])
            for file in (inner.with_suffix(".py"), inner / "__init__.py"):
                if file.is_file():
                    package = folder / parts[0]
                    whole = folder == Path.cwd() and package.is_dir()
                    return _digest(sorted(package.rglob("*.py")) if whole else [file])
    return None


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()
