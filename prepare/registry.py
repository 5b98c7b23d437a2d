"""The registry of steps: a mapping from names to classes, for built-in and third-party steps."""

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
    """Register a step under `name`; make the class a frozen, keyword-only dataclass if needed.

    Raises:
        StepError: the class is not a subclass of one of the four kinds of step.
        ConfigError: the name is taken; the message names both classes.
    """

    def decorate(cls: _Class) -> _Class:
        if not (isinstance(cls, type) and issubclass(cls, _KINDS)):
            kinds = ", ".join(kind.__name__ for kind in _KINDS)
            raise StepError(f"step {name!r}", f"{cls!r} is not a step", f"subclass one of {kinds}")
        if "__dataclass_params__" not in vars(cls):
            # Without slots this changes `cls` in place and returns it.
            dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        cls.name = name
        STEPS.add(name, cls)
        return cls

    return decorate


class Registry(Mapping[str, type[Step]]):
    """A mapping from names to step classes, sorted by name; third-party steps are imported on first use."""

    def __init__(self) -> None:
        self._classes: dict[str, type[Step]] = {}
        self._entry_points: dict[str, metadata.EntryPoint] | None = None

    def add(self, name: str, cls: type[Step]) -> None:
        """Register `cls`; importing the same class again is not a conflict."""
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
        """Import the built-in steps once, and return the entry points of installed packages."""
        if self._entry_points is None:
            entry_points: dict[str, metadata.EntryPoint] = {}
            self._entry_points = entry_points
            package = importlib.import_module("prepare.steps")
            for module in pkgutil.iter_modules(package.__path__):
                if not (module.ispkg or module.name.startswith("_")):
                    importlib.import_module(f"{package.__name__}.{module.name}")
            for point in metadata.entry_points(group=ENTRY_POINTS):
                self._declare(point, entry_points)
        return self._entry_points

    def _declare(
        self, point: metadata.EntryPoint, declared: dict[str, metadata.EntryPoint]
    ) -> None:
        taken = declared.get(point.name)
        if taken is not None and taken.value != point.value:
            raise _name_taken(point.name, taken.value, point.value)
        if point.name in self._classes:
            raise _name_taken(point.name, owner(self._classes[point.name]), point.value)
        declared[point.name] = point

    def _load(self, point: metadata.EntryPoint) -> None:
        try:
            loaded = point.load()
        except Exception as error:
            wrong = f"the plugin {point.value} failed to import: {type(error).__name__}: {error}"
            raise StepError(
                f"steps.{point.name}", wrong, "repair or uninstall that package"
            ) from error
        if point.name not in self._classes:
            if not (isinstance(loaded, type) and issubclass(loaded, _KINDS)):
                raise StepError(f"steps.{point.name}", f"{point.value} is not a step")
            register(point.name)(loaded)


def owner(cls: type[Step]) -> str:
    """Return the qualified name of a step's class: `package.module.Class`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _name_taken(name: str, first: str, second: str) -> ConfigError:
    return ConfigError(
        f"steps.{name}", f"the name is taken twice, by {first} and by {second}", "rename one"
    )


STEPS = Registry()
