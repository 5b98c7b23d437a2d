"""The contract and the registry of stages: one thing that a run does with its model, as a plugin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, dataclass_transform

from prepare.core.utils.options import as_written, plain, read_options
from prepare.errors import ConfigError, Problem, StepError, raise_problems
from prepare.registry import Registry

if TYPE_CHECKING:
    import torch

    from prepare.core.document import Document, ReportContext
    from prepare.core.forward.example_input import Example
    from prepare.core.forward.torch_state import Amp
    from prepare.core.utils.text import Progress
    from prepare.pipeline import Pipeline
    from prepare.pipeline.plan import Plan

Mode = Literal["eval", "train"]
Level = Literal["none", "short"]
_StageClass = TypeVar("_StageClass", bound="type[Stage]")


def _check_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < 1e9:
        raise ValueError(f"{as_written(seconds)} is not a time", "give seconds, as in 60")


# The type of a key that several stages have.
Seconds = Annotated[float | None, "seconds, as in 60", _check_seconds]


@dataclass(frozen=True, slots=True)
class Task:
    """A word of `task=`.

    `help` says what it does. `stages` are the names of the stages that it runs, in the order of their
    `order`; None for those of a plain run and the stage that brings the word. Without `prepares` the model
    is left as it is.
    """

    help: str
    stages: tuple[str, ...] | None = None
    prepares: bool = True


# The exit codes of a run, and those of the verdicts by the status of its result.
DONE, FAILED, WRONG, NOT_VERIFIED, INTERRUPTED = 0, 1, 2, 3, 130
_CODES = {"failed": FAILED, "verification_failed": NOT_VERIFIED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of a stage on its run: the fields of its result; the status is one of `_CODES`."""

    status: str
    reason: str
    error: str

    @property
    def code(self) -> int:
        """The exit code of the run."""
        return _CODES[self.status]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of a sweep: its title, and the text of a row by its figures, empty if not known.

    A narrow terminal leaves out the columns with the highest `spare` first, and never one with 0.
    """

    title: str
    text: Callable[[Any], str]
    spare: int = 0
    number: bool = False


def key(default: Any, text: str, example: str = "") -> Any:
    """Return a field that is a key of the configuration.

    `text` says in a few words what it is for, `example` what a user may write; both stand in `--help`.
    """
    about = {"help": text, "example": example}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy(default), metadata=about)
    return field(default=default, metadata=about)


@dataclass(kw_only=True)
class StageContext:
    """The model of a run, and what is known of it so far: a stage works with it.

    Attributes:
        model: the model; prepared in place before the stages run.
        settings: the settings of the run: `task`, `mode`, `seed`, `strict`, `steps`, `choices`.
        example: the example input as declared; None if there is none.
        formatted: the example as the pipeline formats it.
        pipeline: the pipeline that is applied, or was.
        plan: its plan, made before.
        reference: a copy of the unprepared model, the reason why there is none, or None if none is needed.
        unchanged: whether the pipeline changes neither the model nor the example.
        took: the seconds of a first forward of the prepared model; 0 if not known.
        build: builds the unprepared model again.
        progress: is entered with a line on what begins.
        found: the records of the stages that ran, by the name of their file without its suffix.
        notes: sentences that the terminal shows.
    """

    model: torch.nn.Module
    settings: Any
    example: Example | None
    pipeline: Pipeline
    plan: Plan
    build: Callable[[], torch.nn.Module]
    formatted: Example | None = None
    reference: torch.nn.Module | str | None = None
    unchanged: bool = False
    took: float = 0.0
    progress: Progress = lambda _: nullcontext()
    found: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def amp(self) -> Amp:
        """The autocast of every forward."""
        return self.settings.amp

    def step_seconds(self) -> float:
        """Return the seconds of a step; a backward takes twice its forward."""
        return self.took * (3 if self.settings.mode == "train" else 1)

    def needed_example(self) -> Example:
        """Return the example input as declared. Raises ConfigError if there is none."""
        if not self.example:
            wrong = f"task={self.settings.task} needs an example input"
            raise ConfigError("input", wrong, "give one with input.shape=[...]")
        return self.example


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One thing that a run does with its model.

    A subclass is a frozen dataclass: its fields, made by `key`, are the keys of the configuration below its
    name. A field `level` may be given as the name alone, `verify=short`. It is registered by
    `stage`, and imports torch in its methods only.
    """

    name: ClassVar[str] = ""
    noun: ClassVar[str] = ""
    """The stage in a sentence: `not done: verification and timing`."""
    order: ClassVar[int] = 100
    """Stages of one run follow each other in this order."""
    default: ClassVar[bool] = False
    """True if a plain run has this stage."""
    tasks: ClassVar[Mapping[str, Task]] = {}
    """The words of `task=` that this stage brings."""
    columns: ClassVar[tuple[Column, ...]] = ()
    """Columns of the table of a sweep."""
    fails: ClassVar[tuple[str, ...]] = ()
    """Words of `fail_on`: a run that asks for one fails if `failure` has a reason."""
    imports: ClassVar[tuple[str, ...]] = ()
    """Modules that `run` imports: a sweep loads those of a plain run once for all of its jobs."""
    groups: ClassVar[bool] = False
    """True if a config group of its name has the options, one file each."""

    @classmethod
    def records(cls) -> Mapping[str, Any]:
        """Return the class of each record that it writes, by its file; a class has `save` and `load`."""
        return {}

    @classmethod
    def has_level(cls) -> bool:
        """Return whether the key `name` may be given a word, its level."""
        return any(field.name == "level" for field in dataclasses.fields(cls))

    @classmethod
    def defaults(cls) -> Any:
        """Return the value of the key `name` as a configuration holds it by default."""
        values = {each.name: plain(getattr(cls(), each.name)) for each in dataclasses.fields(cls)}
        return values["level"] if list(values) == ["level"] else values

    @classmethod
    def from_options(cls, options: Any, config: Mapping[str, Any]) -> Any:
        """Check the value of the key `name`, and what it needs of the rest of `config`.

        Raises:
            ConfigError: with one problem for every error in it.
        """
        if not isinstance(options, Mapping):
            if not cls.has_level():
                word = next(iter(cls.tasks), "")
                remedy = f"write task={word} to {word}" if word else "give its keys"
                remedy += f", or set its keys as {cls.name}.KEY=value"
                raise ConfigError(cls.name, f"{as_written(options)} is not a mapping", remedy)
            options = {"level": options}
        try:
            read = cls(**read_options(cls, options, where=cls.name, noun="key"))
        except ConfigError as error:
            where = {f"{cls.name}.level": cls.name}
            problems = error.problems
            raise ConfigError.of(
                dataclasses.replace(p, where=where.get(p.where, p.where)) for p in problems
            ) from None
        raise_problems(ConfigError, read.problems(config))
        return read

    def problems(self, config: Mapping[str, Any]) -> Iterable[Problem]:
        """Return what is wrong with the options together, and with the rest of the configuration."""
        return ()

    def choose(self, work: StageContext) -> Pipeline | None:
        """Return another pipeline to apply, found with the unprepared model; None to keep it."""
        return None

    def needs_reference(self) -> Literal["no", "small", "always"]:
        """Return whether this stage compares with a copy of the unprepared model; `short` does.

        `small`: unless the model is large. Who gives the seconds gets the copy of a large model too.
        """
        if getattr(self, "level", "") != "short":
            return "no"
        return "always" if getattr(self, "seconds", None) else "small"

    def longest(self, work: StageContext) -> float:
        """Return the most seconds that `run` takes; 0 if that is short or not known."""
        del work
        return 0.0

    def run(self, work: StageContext) -> Mapping[str, Any]:
        """Do it; return the records by name. The model is prepared, and left as it is."""
        raise NotImplementedError

    @classmethod
    def verdict(cls, found: Mapping[str, Any]) -> Verdict | None:
        """Return what the records mean for the status of the run and its exit code; None for nothing."""
        return None

    @classmethod
    def failure(cls, word: str, found: Mapping[str, Any]) -> str:
        """Return why a run with `fail_on=word` fails; empty if it does not."""
        return ""

    @classmethod
    def figures(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the figures of the records as plain values, for `result.json` and sweeps."""
        return {}

    @classmethod
    def document(cls, shown: ReportContext) -> Document | None:
        """Return what is shown of it; None for nothing."""
        return None


# The words that belong to no stage.
_TASKS = {
    "prepare": Task("prepare the model, and audit the result"),
    "plan": Task("show what would change, and change nothing", stages=(), prepares=False),
}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def stage(name: str) -> Callable[[_StageClass], _StageClass]:
    """Register a stage under `name`; make the class a frozen, keyword-only dataclass if needed.

    Raises:
        StepError: the class is not a subclass of `Stage`.
        ConfigError: the name is taken; the message names both classes.
    """
    return lambda cls: STAGES.register(name, cls)


def tasks() -> dict[str, Task]:
    """Return every word of `task=` with what it does, in the order in which they are shown."""
    brought = {word: task for cls in ordered_stages() for word, task in cls.tasks.items()}
    return {**_TASKS, **brought}


def ordered_stages() -> list[type[Stage]]:
    """Return the installed stages in the order in which a run has them.

    A plugin that cannot be imported is left out: only who names it meets its error.
    """
    found = []
    for name in STAGES:
        with suppress(StepError):
            found.append(STAGES[name])
    return sorted(found, key=lambda cls: (cls.order, cls.name))


def stages_of(word: str) -> list[str]:
    """Return the names of the stages that `task=word` runs, in their order."""
    chosen, stages = tasks()[word].stages, ordered_stages()
    if chosen is None:
        return [cls.name for cls in stages if cls.default or word in cls.tasks]
    return [cls.name for cls in stages if cls.name in chosen]


def _stage_modules() -> Iterator[str]:
    """Yield the module of each built-in stage: `stage.py` in a folder of its own."""
    for path in sorted(Path(__file__).parent.glob("*/stage.py")):
        yield f"prepare.stages.{path.parent.name}.stage"


STAGES: Registry[Stage] = Registry(
    (Stage,), group="prepare.stages", builtin=_stage_modules, noun="stage", place="{}"
)
