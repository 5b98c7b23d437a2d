"""The one registry: from a step's name to its class, for built-in and third-party steps alike."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import TypeVar, dataclass_transform

from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError, StepError, UnknownStepError
from prepare.step import InputStep, ModelStep, ModuleStep, Step, TensorStep

ENTRY_POINTS = "prepare.steps"
_KINDS = (TensorStep, ModuleStep, ModelStep, InputStep)
_Class = TypeVar("_Class", bound=type[Step])


@dataclass_transform(frozen_default=True, kw_only_default=True)
def register(name: str) -> Callable[[_Class], _Class]:
    """Registers a step under `name`; makes the class a frozen, keyword-only dataclass if it is none yet.

    Raises:
        StepError: the class is of none of the four kinds of step.
        ConfigError: the name is taken; the message names both owners.
    """

    def decorate(cls: _Class) -> _Class:
        if not (isinstance(cls, type) and issubclass(cls, _KINDS)):
            kinds = ", ".join(kind.__name__ for kind in _KINDS)
            raise StepError(f"step {name!r}", f"{cls!r} is not a step", f"subclass one of {kinds}")
        if "__dataclass_params__" not in vars(cls):
            cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        cls.name = name
        STEPS.add(name, cls)
        return cls

    return decorate


class Registry(Mapping[str, type[Step]]):
    """Names to step classes, sorted by name; a third-party step is imported when it is first used."""

    def __init__(self) -> None:
        self._classes: dict[str, type[Step]] = {}
        self._entry_points: dict[str, metadata.EntryPoint] | None = None

    def add(self, name: str, cls: type[Step]) -> None:
        """Registers `cls`; importing the same class again is no clash."""
        taken = self._classes.get(name)
        if taken is not None and owner(taken) != owner(cls):
            raise _name_taken(name, owner(taken), owner(cls))
        self._classes[name] = cls

    def __getitem__(self, name: str) -> type[Step]:
        declared = self._discover()
        if name not in self._classes and name in declared:
            self._load(declared[name])
        if name not in self._classes:
            raise UnknownStepError(
                f"steps.{name}", "no such step", choose(name, self, noun="steps")
            )
        return self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._discover(), *self._classes}))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._discover() or name in self._classes

    def _discover(self) -> dict[str, metadata.EntryPoint]:
        """Imports the built-in steps once, and reads what the installed packages declare."""
        if self._entry_points is None:
            self._entry_points = {}
            package = importlib.import_module("prepare.steps")
            for module in pkgutil.iter_modules(package.__path__):
                if not (module.ispkg or module.name.startswith("_")):
                    importlib.import_module(f"{package.__name__}.{module.name}")
            for point in metadata.entry_points(group=ENTRY_POINTS):
                self._declare(point)
        return self._entry_points

    def _declare(self, point: metadata.EntryPoint) -> None:
        taken = self._entry_points.get(point.name)
        if taken is not None and taken.value != point.value:
            raise _name_taken(point.name, taken.value, point.value)
        if point.name in self._classes:
            raise _name_taken(point.name, owner(self._classes[point.name]), point.value)
        self._entry_points[point.name] = point

    def _load(self, point: metadata.EntryPoint) -> None:
        try:
            loaded = point.load()
        except Exception as error:
            wrong = f"the plugin {point.value} failed to import: {type(error).__name__}: {error}"
            raise StepError(
                f"steps.{point.name}", wrong, "mend or uninstall that package"
            ) from error
        if point.name not in self._classes:
            if not (isinstance(loaded, type) and issubclass(loaded, _KINDS)):
                raise StepError(f"steps.{point.name}", f"{point.value} is not a step")
            register(point.name)(loaded)


def owner(cls: type[Step]) -> str:
    """Where a step comes from: `package.module.Class`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _name_taken(name: str, first: str, second: str) -> ConfigError:
    return ConfigError(
        f"steps.{name}", f"the name is taken twice, by {first} and by {second}", "rename one"
    )


STEPS = Registry()
