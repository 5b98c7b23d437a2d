"""Offer the config groups of prepare in every Hydra application of this environment, below `prepare/`.

Nothing is added, read or listed until `+prepare=default` or a defaults list asks for it: an application's own
key or group `prepare` works as without us.

What does not keep that: a folder in the search path is listed in every `--help`, and makes `prepare=true` of
somebody's own key a choice in a group; a name that nobody else has would be listed too; `sys.argv` lacks the
words of Hydra's compose API. So the source looks for the override in its callers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.object_type import ObjectType

_UNDER = "prepare"
# The groups that fill `steps`. Another application has its own networks, example inputs and launchers.
CHOICES = ("device", "precision", "memfmt")
_GROUPS = {_UNDER, f"{_UNDER}/steps", *(f"{_UNDER}/{name}" for name in CHOICES)}
_ROOT = Path(__file__).resolve().parents[1]
# The folder of our command line's configurations, in a checkout and in a wheel.
_OWN = [str(_ROOT / folder) for folder in ("conf", "prepare/conf")]


class PrepareSearchPath(SearchPathPlugin):
    """Adds the groups to the search path of an application; our own command line has them at its root."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the groups, so that an application's own files come first."""
        paths = [str(each.path).removeprefix("file://") for each in search_path.get_path()]
        own = next((path for path in paths if path in _OWN), None)
        added = (
            f"{PrepareGroups.scheme()}://" if own is None else f"{PrepareWords.scheme()}://{own}"
        )
        if added not in paths:  # Hydra may load this plugin twice
            search_path.append(_UNDER, added)


class PrepareWords(FileConfigSource):
    """The other names of the options of our own command line: `precision=bf16` is `precision=bfloat16`."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source in a search path."""
        return f"{_UNDER}-words"

    def available(self) -> bool:
        """Return True: the files are part of the package."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return False: other names are not listed."""
        return False

    def is_config(self, config_path: str) -> bool:
        """Return whether the path is another name of one of our options."""
        group, name = _split(config_path)
        return group in CHOICES and _file(group, name).is_file()

    def load_config(self, config_path: str) -> ConfigResult:
        """Read the option that is meant."""
        group, name = _split(config_path)
        return super().load_config(f"{group}/{_file(group, name).stem}")


class PrepareGroups(ConfigSource):
    """The option files of our command line, moved from its root to below `prepare`."""

    # Whether this process has loaded one of them: then they are listed, as in --help.
    asked: ClassVar[bool] = False

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source in a search path."""
        return _UNDER

    def available(self) -> bool:
        """Return True: the files are part of the package."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether the path is one of our groups; `prepare` itself is one where it is asked for."""
        path = config_path.strip("/")
        return _is_asked() if path in ("", _UNDER) else path in _GROUPS

    def is_config(self, config_path: str) -> bool:
        """Return whether the path is one of our options."""
        group, name = _split(config_path)
        return group in _GROUPS and (
            name == "default" if group == _UNDER else bool(group) and _file(group, name).is_file()
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of the groups or options below a group."""
        path = config_path.strip("/")
        groups = {each.rpartition("/")[2] for each in _GROUPS if each.rpartition("/")[0] == path}
        names = {"default"} if path == _UNDER else set()
        if path not in ("", _UNDER):
            names = {file.stem for file in _file(path, "").parent.glob("*.yaml")}
        kind = getattr(results_filter, "name", "")
        return sorted(
            (groups if kind != "CONFIG" else set()) | (names if kind != "GROUP" else set())
        )

    def load_config(self, config_path: str) -> ConfigResult:
        """Read an option, and return it with the package below which it belongs."""
        from omegaconf import OmegaConf

        if not self.is_config(config_path):
            raise ConfigLoadError(f"Config not found : {config_path}")
        PrepareGroups.asked = True
        group, name = _split(config_path)
        if group == _UNDER:
            defaults = _read(_file(_UNDER, "config"))["defaults"]
            chosen = [
                each for each in defaults if isinstance(each, dict) and set(each) <= {*CHOICES}
            ]
            node = {"defaults": ["_self_", *chosen], "steps": {}}
        else:
            node = _read(_file(group, name))
        if "defaults" in node:
            node = {**node, "defaults": list(map(_moved, node["defaults"]))}
        package = f"{_UNDER}.steps" if group == f"{_UNDER}/steps" else _UNDER
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(node),
            header={"package": package},
        )


def _is_asked() -> bool:
    """Return whether `prepare` stands for our group: in `+prepare=default`, or in a list once it was loaded.

    Hydra tells a source the key alone, which may be anybody's; the override is in the frame of a caller.
    """
    frame = sys._getframe(2)
    while frame is not None:
        found = [each for each in frame.f_locals.values() if isinstance(each, Override)]
        if found:
            chosen = found[0].value()
            return found[0].is_add() and chosen in ("default", ["default"])
        frame = frame.f_back
    return PrepareGroups.asked


def _split(config_path: str) -> tuple[str, str]:
    """Return the group and the name of an option."""
    group, _, name = config_path.removesuffix(".yaml").strip("/").rpartition("/")
    return group, name


def _file(group: str, name: str) -> Path:
    from prepare.core.utils.files import conf_dir, own_name

    group = group.removeprefix(_UNDER).strip("/")
    return conf_dir() / group / f"{own_name(group, name)}.yaml"


def _moved(entry: Any) -> Any:
    """Move an entry of a defaults list from the root (`/steps/half@steps`) to below `prepare`."""
    return f"/{_UNDER}{entry}" if isinstance(entry, str) and entry.startswith("/") else entry


def _read(path: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
