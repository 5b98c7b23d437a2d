"""The registry of steps: a mapping from names to classes, for built-in and third-party ones."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import Any, Generic, TypeVar, dataclass_transform

from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError, Problem, StepError, UnknownStepError
from prepare.step import InputStep, ModelStep, ModuleStep, Step, TensorStep

_Registered = TypeVar("_Registered")
_Class = TypeVar("_Class", bound=type[Step])


@dataclass_transform(frozen_default=True, kw_only_default=True)
def register(name: str) -> Callable[[_Class], _Class]:
    """Register a step under `name`; make the class a frozen, keyword-only dataclass if needed.

    Raises:
        StepError: the class is not a subclass of one of the four kinds of step.
        ConfigError: the name is taken; the message names both classes.
    """
    return lambda cls: STEPS.register(name, cls)


class Registry(Mapping[str, type[_Registered]], Generic[_Registered]):
    """A mapping from names to classes, sorted by name; third-party classes are imported on first use.

    `builtin` returns the names of the modules with the built-in classes; third-party ones are behind the
    entry points of `group`. `noun` is the word for one in messages, `place` the key of a configuration that
    names it.
    """

    def __init__(
        self,
        kinds: tuple[type, ...],
        *,
        group: str,
        builtin: Callable[[], Iterable[str]],
        noun: str,
        place: str,
    ) -> None:
        self._kinds, self._noun, self._place = kinds, noun, place
        self._group, self._builtin = group, builtin
        self._classes: dict[str, type[_Registered]] = {}
        self._entry_points: dict[str, metadata.EntryPoint] | None = None

    def register(self, name: str, cls: Any) -> Any:
        """Add a class, and return it; make it a frozen, keyword-only dataclass if needed."""
        if not self._is_one(cls):
            kinds = ", ".join(kind.__name__ for kind in self._kinds)
            wrong = f"{cls!r} is not a {self._noun}"
            raise StepError(f"{self._noun} {name!r}", wrong, f"subclass one of {kinds}")
        if "__dataclass_params__" not in vars(cls):
            # Without slots this changes `cls` in place and returns it.
            dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        cls.name = name
        self._check_free(name, owner(self._classes.get(name, cls)), owner(cls))
        self._classes[name] = cls
        return cls

    def __getitem__(self, name: str) -> type[_Registered]:
        declared = self._discover()
        if name not in self._classes and name in declared:
            self._load(declared[name])
        if name not in self._classes:
            raise UnknownStepError.of([self.problem(name)])
        return self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._discover(), *self._classes}))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._discover() or name in self._classes

    def problem(self, name: str) -> Problem:
        """Return the problem of a name that is not registered."""
        where = self._place.format(name)
        return Problem(where, f"no such {self._noun}", choose(name, self, noun=f"{self._noun}s"))

    def _discover(self) -> dict[str, metadata.EntryPoint]:
        """Import the built-in classes once, and return the entry points of installed packages."""
        if self._entry_points is None:
            declared: dict[str, metadata.EntryPoint] = {}
            self._entry_points = declared
            for module in self._builtin():
                importlib.import_module(module)
            for point in metadata.entry_points(group=self._group):
                name = point.name
                if name in self._classes:
                    self._check_free(name, owner(self._classes[name]), point.value)
                self._check_free(name, declared.setdefault(name, point).value, point.value)
        return self._entry_points

    def _load(self, point: metadata.EntryPoint) -> None:
        try:
            loaded = point.load()
        except Exception as error:
            wrong = f"the plugin {point.value} failed to import: {type(error).__name__}: {error}"
            remedy = "repair or uninstall that package"
            raise StepError(self._place.format(point.name), wrong, remedy) from error
        if point.name not in self._classes:
            if not self._is_one(loaded):
                wrong = f"{point.value} is not a {self._noun}"
                raise StepError(self._place.format(point.name), wrong)
            self.register(point.name, loaded)

    def _is_one(self, cls: Any) -> bool:
        return isinstance(cls, type) and issubclass(cls, self._kinds)

    def _check_free(self, name: str, first: str, second: str) -> None:
        if first != second:  # importing the same class again is not a conflict
            wrong = f"the name is taken twice, by {first} and by {second}"
            raise ConfigError(self._place.format(name), wrong, "rename one")


def _step_modules() -> Iterator[str]:
    """Yield the names of the public modules of `prepare.steps`."""
    for module in pkgutil.iter_modules(importlib.import_module("prepare.steps").__path__):
        if not (module.ispkg or module.name.startswith("_")):
            yield f"prepare.steps.{module.name}"


def owner(cls: type) -> str:
    """Return the qualified name of a class: `package.module.Class`."""
    return f"{cls.__module__}.{cls.__qualname__}"


STEPS: Registry[Step] = Registry(
    (TensorStep, ModuleStep, ModelStep, InputStep),
    group="prepare.steps",
    builtin=_step_modules,
    noun="step",
    place="steps.{}",
)
