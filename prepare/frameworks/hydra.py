"""Add the config groups of prepare to another Hydra application, under `prepare/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType

from prepare.core.utils.folders import STEP_GROUPS, conf_dir

_UNDER = "prepare"


def register() -> None:
    """Store the config groups of prepare in Hydra's ConfigStore; existing entries are kept.

    Call it before `hydra.main` or `hydra.compose` runs. An application then takes
    `+prepare=default prepare/memfmt=channels_last_3d` (and `prepare/precision`, `prepare/device`,
    `prepare.steps.half.keep=[]`), and builds its pipeline with `Pipeline.from_config(cfg.prepare.steps)`.
    """
    for path in sorted((conf_dir() / "steps").glob("*.yaml")):
        _store(path.stem, f"{_UNDER}/steps", _read(path), package=f"{_UNDER}.steps")
    for group in STEP_GROUPS:
        for path in sorted((conf_dir() / group).glob("*.yaml")):
            # These files fill `steps` at the root; here the root is `prepare`.
            _store(path.stem, f"{_UNDER}/{group}", _read(path), package=_UNDER)
    defaults = _read(conf_dir() / "config.yaml")["defaults"]
    chosen = [
        entry for entry in defaults if isinstance(entry, dict) and set(entry) <= {*STEP_GROUPS}
    ]
    _store("default", _UNDER, {"defaults": ["_self_", *chosen], "steps": {}}, package=_UNDER)


def _store(name: str, group: str, node: dict[str, Any], *, package: str) -> None:
    if "defaults" in node:
        node = {**node, "defaults": list(map(_moved, node["defaults"]))}
    store = ConfigStore.instance()
    if store.get_type(f"{group}/{name}.yaml") is ObjectType.NOT_FOUND:
        store.store(name=name, group=group, node=node, package=package, provider="prepare")


def _moved(entry: Any) -> Any:
    """Move an entry of a defaults list from the root (`/steps/half@steps`) to below `prepare`."""
    return f"/{_UNDER}{entry}" if isinstance(entry, str) and entry.startswith("/") else entry


def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
