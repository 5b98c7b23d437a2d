"""Every error that prepare raises on purpose, as one tree.

    PrepareError
    ├── ConfigError               what was asked for is wrong; the command line exits with 2
    │   ├── UnknownStepError      no step of that name
    │   ├── PatternError          a pattern cannot be read, or matches nothing
    │   ├── NothingMatchesError   a memory format was asked for and no tensor can take it
    │   ├── ConflictError         two steps want different things of one tensor
    │   ├── KnownIssueError       this torch is known to give wrong numbers for it
    │   └── RecipeError           a recipe that cannot be read
    ├── RefusedError              this model cannot be prepared as it is now
    ├── DriftError                a prepared model no longer lies as it was prepared
    ├── PartialError              a failure midway, where the old tensors had been given up
    ├── ModelError                the model's own code raised while it was built or run
    ├── StepError                 a step broke its contract or raised; the step is at fault
    ├── CheckpointError           a file of weights that is broken, or does not fit the model
    ├── AuditError                a file that is not an audit
    ├── FlowError                 a file that is not a flow
    ├── VerificationError         a file that is not a verification
    ├── BenchError                a file that is not a bench
    ├── TuneError                 a file that is not a tuning
    ├── SweepError                the launcher of a sweep stopped before its end
    └── FileError                 a file could not be written or read

Anything else that escapes is a bug of ours and keeps its traceback.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Problem:
    """One mistake: where it is, what is wrong, and what to do about it."""

    where: str
    wrong: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.wrong}" if self.where else self.wrong
        return f"{text}; {self.remedy}" if self.remedy else text


class PrepareError(Exception):
    """The root; holds its mistakes as data in `problems`, one `Problem` each."""

    def __init__(self, where: str, wrong: str, remedy: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(where, wrong, remedy),)
        super().__init__(str(self.problems[0]))

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> Self:
        """One error that holds all of `problems`."""
        first, *rest = problems
        error = cls(first.where, first.wrong, first.remedy)
        error.problems = (first, *rest)
        error.args = ("\n".join(map(str, error.problems)),)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        # Sweeps carry errors between processes; Exception's own way would call __init__ with the text.
        return _restored, (type(self), self.args, vars(self))


def _restored(cls: type[PrepareError], args: tuple, attributes: dict[str, Any]) -> PrepareError:
    error = cls.__new__(cls)
    error.args = args
    vars(error).update(attributes)
    return error


class ConfigError(PrepareError):
    """What was asked for is wrong."""


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
    """Two steps want different things of one tensor."""


class KnownIssueError(ConfigError):
    """This torch is known to give wrong numbers for this model in training, prepared so."""


class KnownIssueWarning(UserWarning):
    """What torch is known to do wrong or slowly with this model, prepared so."""


class RecipeError(ConfigError):
    """A recipe that cannot be read."""


class RefusedError(PrepareError):
    """This model cannot be prepared as it is now; the remedy says what to do first."""


class DriftError(PrepareError):
    """A prepared model no longer lies as it was prepared; one problem for everything that differs."""


class PartialError(PrepareError):
    """A failure midway, where the old tensors had been given up to save memory.

    `changed` and `unchanged` hold the names of the tensors; every one of them is whole.
    """

    def __init__(self, cause: BaseException, changed: list[str], unchanged: list[str]) -> None:
        self.changed, self.unchanged = changed, unchanged
        total = len(changed) + len(unchanged)
        super().__init__(
            "low_memory",
            f"{type(cause).__name__} after {len(changed)} of {total} tensors: {cause}",
            f"changed: {', '.join(changed)}; as before: {', '.join(unchanged)}; apply again to finish",
        )


class ModelError(PrepareError):
    """The model's own code raised while it was built or run; what it raised is the cause."""


class StepError(PrepareError):
    """A step broke its contract, or raised; the step is at fault, not its user."""


class CheckpointError(PrepareError):
    """A file of weights that is broken or does not fit the model; one problem for every tensor.

    Each problem's `where` is the file, and after a comma the tensor where it is one tensor's.
    """


class AuditError(PrepareError):
    """A file that is not an audit."""


class FlowError(PrepareError):
    """A file that is not a flow."""


class BenchError(PrepareError):
    """A file that is not a bench."""


class TuneError(PrepareError):
    """A file that is not a tuning."""


class VerificationError(PrepareError):
    """A file that is not a verification."""


class SweepError(PrepareError):
    """The launcher of a sweep stopped before its end; what its jobs had done by then is kept."""


class FileError(PrepareError):
    """A file could not be written or read."""
