"""Which known issues a model will meet once it is as a pipeline wants it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from prepare.core.model.known_issues import Issue, standing
from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.repair_marker import is_repair
from prepare.core.model.tensors import is_strided, name_of
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError, Problem
from prepare.pipeline.tensor_table import Table, Wanted
from prepare.steps.repairs import find

KnownIssues = Literal["error", "warn", "ignore"]

_SHOWN = 1
_ONLY: dict[str, Callable[[Any], bool]] = {
    "": lambda _: True,
    "depthwise": lambda module: module.groups == module.in_channels > 1,
}
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Met:
    """One known issue, the names and classes of the modules that meet it, and whether that is an error.

    `unasked`: whether the step that mends it has to be forced, since no convolution is in channels-last.
    """

    issue: Issue
    modules: Mapping[str, str]
    is_error: bool
    unasked: bool

    def problem(self) -> Problem:
        """It in words, with the way out."""
        names = list(self.modules)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        kinds = ", ".join(sorted(set(self.modules.values())))
        where = f"{kinds} ({', '.join(name or 'the model' for name in names[:_SHOWN])}{more})"
        wrong = f"{self.issue.what} [{self.issue.name}]"
        return Problem(where, wrong, self._way_out())

    def _way_out(self) -> str:
        if self.issue.repair:
            options = "force:true" if self.unasked else ""
            return f"add the step repair_layout, +steps.repair_layout={{{options}}}"
        if self.issue.effect == "wrong":
            return "exclude them, take another memory format, or known_issues=warn to go on"
        if self.issue.effect == "risk":
            return "look at what the run's verification says, with the sizes you train on"
        return ""


def consult(model: nn.Module, table: Table, known_issues: KnownIssues) -> list[Met]:
    """What is known of this model, as `table` will leave it; errors first.

    Numbers known to be wrong are an error for a model in training mode, and a warning in eval mode,
    or where `known_issues` is "warn"; with "ignore" nothing is looked up.
    """
    if known_issues == "ignore":
        return []
    formats, dtypes, devices = _convolutions(table)
    if not devices:
        return []
    kinds: dict[str, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        kinds.setdefault(_kind(type(module)), {})[name] = module
    met = []
    for issue in dict.fromkeys(issue for device in sorted(devices) for issue in standing(device)):
        if issue.effect == "sometimes":
            continue
        modules = {
            name: kind
            for kind in issue.operations
            if kind in kinds and issue.concerns(kind, formats, dtypes)
            for name, module in kinds[kind].items()
            if _ONLY[issue.only](module) and (not issue.repair or find(issue.repair).fits(module))
        }
        if modules:
            wrong = issue.effect == "wrong" and model.training
            is_error = wrong and known_issues == "error"
            unasked = formats.isdisjoint({*issue.formats} - {"contiguous"})
            met.append(Met(issue, modules, is_error, unasked))
    return sorted(met, key=lambda one: not one.is_error)


def _kind(cls: type[nn.Module]) -> str:
    """The name of a module's class: of torch's, where the module was repaired."""
    torchs = (base for base in cls.__mro__ if base.__module__.startswith("torch."))
    return next(torchs, cls).__name__ if is_repair(cls) else cls.__name__


def check_choice(known_issues: str) -> None:
    """Raises ConfigError for a word that is none of error, warn and ignore."""
    if known_issues not in get_args(KnownIssues):
        remedy = choose(str(known_issues), get_args(KnownIssues))
        raise ConfigError("known_issues", f"{known_issues!r} is not allowed", remedy)


def _convolutions(table: Table) -> tuple[set[str], set[str], set[str]]:
    """The formats and dtypes that convolutions' weights will have, and the types of their devices."""
    formats, dtypes, devices = set(), set(), set()
    for wanted in table.tensors:
        if not is_strided(wanted.tensor) or not _is_weight(wanted):
            continue
        move, tensor = wanted.move(), wanted.tensor
        stride = tuple(move.stride if move else tensor.stride())
        asked = wanted.wants.get("memory_format")
        formats.add(asked or _format(tensor.shape, stride))
        dtypes.add(name_of(move.dtype if move else tensor.dtype))
        devices.add((move.device if move else tensor.device).type)
    return formats - {""}, dtypes, devices


def _is_weight(wanted: Wanted) -> bool:
    return wanted.tensor.dim() in (4, 5) and any(
        isinstance(place.module, _CONVOLUTIONS) for place in wanted.places
    )


def _format(shape: Iterable[int], stride: tuple[int, ...]) -> str:
    """The format whose canonical strides these are; empty for any other."""
    shape = tuple(shape)
    last = "channels_last" if len(shape) == 4 else "channels_last_3d"
    both = ("contiguous", last)
    return next((name for name in both if canonical_stride(shape, name) == stride), "")
