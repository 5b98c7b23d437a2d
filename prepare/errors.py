"""The exception classes of prepare, as one tree.

    PrepareError
    ├── ConfigError               what was asked for is wrong; the command line exits with 2
    │   ├── UnknownStepError      no step of that name
    │   ├── PatternError          a pattern cannot be read, or matches nothing
    │   ├── NothingMatchesError   what was asked for fits no tensor of the model
    │   ├── ConflictError         two steps want different values for one tensor
    │   ├── KnownIssueError       this version of torch has a known issue with wrong numbers
    │   └── RecipeError           a recipe that cannot be read
    ├── RefusedError              this model cannot be prepared as it is now
    ├── DriftError                a prepared model is no longer in its prepared state
    ├── PartialError              a failure midway, when old tensors had already been freed
    ├── ModelError                the model's own code raised while it was built or run
    ├── StepError                 a step broke its contract or raised; the step is at fault
    ├── CheckpointError           a file of weights that is broken, or does not fit the model
    └── FileError                 a file could not be written or read

Any other exception from prepare is a bug, and is shown with its traceback.
"""

import copyreg
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

# Names and messages of others may hold what a terminal takes as a command; Python prints them as they are.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# The most characters of a place and of a message, which a file may have chosen, and the most lines.
_LONGEST_PLACE, _LONGEST, _MOST_LINES = 1_000, 3_000, 100


@dataclass(frozen=True)
class Problem:
    """One mistake: its place, what is wrong, and the remedy."""

    where: str
    wrong: str
    remedy: str = ""

    def __str__(self) -> str:
        where, wrong = _cut(self.where, _LONGEST_PLACE), _cut(self.wrong, _LONGEST)
        where = "".join(map(_escaped, where))  # a place is one line
        text = f"{where}: {wrong}" if where else wrong
        text = f"{text}; {self.remedy}" if self.remedy else text
        return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


class PrepareError(Exception):
    """The root; `problems` holds one `Problem` for each mistake."""

    def __init__(self, where: str, wrong: str, remedy: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(where, wrong, remedy),)
        super().__init__(str(self.problems[0]))

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> Self:
        """Return one error that holds all of `problems`."""
        first, *rest = problems
        error = cls(first.where, first.wrong, first.remedy)
        error.problems = (first, *rest)
        lines = [*map(str, error.problems[:_MOST_LINES])]
        if (more := len(error.problems) - len(lines)) > 0:
            lines.append(f"and {more:,} more problems")
        error.args = ("\n".join(lines),)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        # Sweeps pickle errors; Exception.__reduce__ would call __init__ with the text only.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


def raise_problems(kind: type[PrepareError], problems: Iterable[Problem]) -> None:
    """Raise one error of `kind` that holds all `problems`, if there are any."""
    if problems := list(problems):
        raise kind.of(problems)


class ConfigError(PrepareError):
    """The configuration or the arguments are wrong."""


def combined(errors: Sequence[ConfigError]) -> ConfigError:
    """Return one error that holds the problems of all `errors`, of their class if they share one."""
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    return kind.of(problem for error in errors for problem in error.problems)


class UnknownStepError(ConfigError):
    """No step of that name is registered."""


class PatternError(ConfigError):
    """A pattern cannot be read, or matches nothing."""


class NothingMatchesError(ConfigError):
    """A memory format was asked for, and no tensor of the model can take it."""


class ConflictError(ConfigError):
    """Two steps want different values for one tensor."""


class KnownIssueError(ConfigError):
    """This version of torch has a known issue: wrong numbers in training this model, so prepared."""


class KnownIssueWarning(UserWarning):
    """A known issue of torch makes this model, so prepared, wrong or slow."""


class RecipeError(ConfigError):
    """A recipe that cannot be read."""


class RecipeWarning(UserWarning):
    """An option is left out of a recipe that is written, since a recipe may not set it."""


class UntrainedWarning(UserWarning):
    """No optimizer that was given trains some parameters of the model."""


class RefusedError(PrepareError):
    """This model cannot be prepared in its current state; the remedy says what to do first."""


class DriftError(PrepareError):
    """A prepared model is no longer in its prepared state; one problem for each difference."""


class PartialError(PrepareError):
    """A failure midway, when old tensors had already been freed to save memory.

    `changed` and `unchanged` hold the names of the tensors; every tensor is complete.
    """

    def __init__(self, cause: BaseException, changed: list[str], unchanged: list[str]) -> None:
        self.changed, self.unchanged = changed, unchanged
        total = len(changed) + len(unchanged)
        wrong = f"{type(cause).__name__} after {len(changed)} of {total} tensors: {cause}"
        left = ", ".join(unchanged) or "none"
        remedy = f"changed: {', '.join(changed)}; as before: {left}; apply again to finish"
        super().__init__("low_memory", wrong, remedy)


class ModelError(PrepareError):
    """The model's own code raised while it was built or run; its exception is the `__cause__`."""


class StepError(PrepareError):
    """A step broke its contract, or raised; the step is at fault, not its user."""


class CheckpointError(PrepareError):
    """A file of weights that is broken or does not fit the model; one problem for each tensor.

    `where` of each problem is the file, followed by a comma and the tensor if it is about one.
    """


class FileError(PrepareError):
    """A file could not be written or read."""
