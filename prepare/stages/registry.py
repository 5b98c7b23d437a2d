"""The registry of stages: names to classes, and the words of `task=` that they bring."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, dataclass_transform

from prepare.errors import StepError
from prepare.registry import Registry
from prepare.stages.stage import Stage, Task

STAGE_ENTRY_POINTS = "prepare.stages"
_StageClass = TypeVar("_StageClass", bound=type[Stage])
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
    (Stage,),
    group=STAGE_ENTRY_POINTS,
    builtin=_stage_modules,
    noun="stage",
    place="{}",
)
