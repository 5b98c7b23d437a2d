"""Write the JSON Schemas of the configuration, for editors and checks: `python docs/make_schema.py`.

They are made of the dataclasses that check a run, and stand in conf/schema: `config.json` for what a file
sets at the root, and one for each group whose files hold the keys of one mapping.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from prepare.app.job.settings import Settings
from prepare.core.forward.example_input import TensorSpec, _Declared
from prepare.core.utils.folders import conf_dir
from prepare.core.utils.suggest import ALIASES, meant
from prepare.registry import STEPS
from prepare.stages.registry import ordered_stages, tasks

FOLDER = conf_dir() / "schema"
_DRAFT = "http://json-schema.org/draft-07/schema#"
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
# What OmegaConf fills in: an interpolation, or a value that is still missing.
_LATER = {"type": "string", "pattern": r"^(.*\$\{.*|\?\?\?)$"}
_OPEN = {"type": ["object", "null"]}


def schemas() -> dict[str, Any]:
    """Return each schema by the name of its file."""
    steps, tensor = _steps(), _properties(TensorSpec)
    drawn = {name: {"anyOf": [*each["anyOf"], {"type": "null"}]} for name, each in tensor.items()}
    inputs = _object(_properties(_Declared) | drawn)
    stages = {cls.name: _stage(cls) for cls in ordered_stages() if _is_ours(cls)}
    plain = {
        name: each
        for name, each in _properties(Settings).items()
        if name not in ("choices", "stages", "model", "steps", "input")
    }
    config = plain | stages
    config |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    config |= {"task": _or_later({"enum": list(tasks())}), "steps": steps}
    config["input"] = {"anyOf": [inputs, {"type": "null"}]}
    config["model"] = {"type": "object", "properties": {"_target_": {"type": "string"}}}
    groups = {"steps": steps, "input": inputs, "verify": stages["verify"], "bench": stages["bench"]}
    wanted = {"config": _object(config), **groups}
    return {f"{name}.json": {"$schema": _DRAFT, **schema} for name, schema in wanted.items()}


def write() -> None:
    """Write the files of the schemas."""
    FOLDER.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (FOLDER / name).write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")


def modeline(path: Path) -> str:
    """Return the line that names the schema of a shipped file; empty if it has none."""
    group = path.parent.relative_to(conf_dir()).as_posix()
    if path.name != "config.yaml" and group in (".", "launcher", "hydra/job_logging"):
        return ""
    text = path.read_text(encoding="utf-8")
    name = "config" if path.name == "config.yaml" or text.startswith("# @package") else group
    above = "" if group == "." else "../"
    return f"# yaml-language-server: $schema={above}schema/{name}.json"


def _is_ours(cls: type) -> bool:
    """Return whether a step or stage is part of this package, and not of an installed plugin."""
    return cls.__module__.startswith("prepare.")


def _steps() -> dict[str, Any]:
    """Return the schema of the mapping of steps; a plugin may add others."""
    known = {}
    for name in STEPS:
        if _is_ours(cls := STEPS[name]):
            about = (inspect.getdoc(cls) or "").partition("\n")[0]
            known[name] = _object(_properties(cls)) | {
                "type": ["object", "null"],
                "description": about,
            }
    return {"type": "object", "properties": known, "additionalProperties": _OPEN}


def _stage(cls: Any) -> dict[str, Any]:
    """Return the schema of the key of a stage: its options, or its level alone."""
    keys = _properties(cls)
    for each in dataclasses.fields(cls):
        if about := each.metadata.get("help"):
            keys[each.name]["description"] = about
    options = _object({"defaults": {"type": "array"}, **keys} if cls.groups else keys)
    return {"anyOf": [options, keys["level"]]} if cls.has_level() else options


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _properties(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {each.name: _or_later(_schema(hints[each.name])) for each in dataclasses.fields(cls)}


def _or_later(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*schema.get("anyOf", [schema]), _LATER]} if schema else {}


def _schema(hint: Any) -> dict[str, Any]:
    """Return the schema of a type, as `prepare.core.utils.options.convert` reads a value of it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        about = next((each for each in args[1:] if isinstance(each, str)), "")
        return _schema(args[0]) | ({"description": about} if about else {})
    if origin in (Union, types.UnionType):
        found = [_schema(each) for each in args]
        return {} if {} in found else {"anyOf": found}
    if origin is Literal:
        return {
            "enum": [*args, *(word for word in ALIASES if word not in args and meant(word, args))]
        }
    if origin is tuple:
        items = _schema(args[0])
        return {"anyOf": [{"type": "array", "items": _or_later(items)}, {"type": "string"}]}
    if hint is list or origin is list:
        return {"type": "array"}
    if dataclasses.is_dataclass(hint):
        return _object(_properties(hint))
    if origin in (dict, Mapping):
        return {"type": "object"}
    return {} if hint is Any else {"type": _TYPES[hint]}


if __name__ == "__main__":
    write()
