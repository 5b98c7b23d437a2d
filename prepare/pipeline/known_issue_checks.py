"""Find the known issues that a model will meet once it is prepared as a pipeline requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from prepare.core.model.forward_code import forward_code, torch_class
from prepare.core.model.known_issues import ONLY, REPAIR_STEP, Issue, standing
from prepare.core.model.memory_format import CHANNELS_LAST, canonical_stride
from prepare.core.model.module_kinds import CONVOLUTIONS_2D_3D, has_own_sizes
from prepare.core.model.tensors import is_strided, name_of
from prepare.core.utils.suggest import choose
from prepare.core.utils.text import EVAL_MODE
from prepare.errors import ConfigError, KnownIssueError, Problem
from prepare.pipeline.tensor_table import RequestTable
from prepare.steps.repairs import find_repair

KnownIssues = Literal["error", "warn", "ignore"]

# A user's class that no repair can reach is named for this issue, which makes it several times slower.
_REFERENCE = "conv3d_reference_cpu"
_ONE = "batch_of_one"
_CURES = {"step": "add the step", "format": "use", "flag": "set", "version": "install"}


@dataclass(frozen=True)
class IssueMatch:
    """A known issue, and the names and classes of the modules that meet it.

    `in_training`: whether the model is in training mode. `only_warns`: whether wrong numbers are no error
    even then. `needs_force`: whether the step that repairs it needs `force`, as no convolution is in
    channels-last. `unreached`: for modules that no repair reaches, as other code stands in the place of
    torch's: the name of that code; None for all others. `batch`: the number of samples of a call, if it is
    known.
    """

    issue: Issue
    modules: Mapping[str, str]
    in_training: bool
    only_warns: bool
    needs_force: bool
    unreached: str | None = None
    batch: int | None = None

    @property
    def is_wrong(self) -> bool:
        """Return whether numbers are wrong at every size, or at batch 1 if the batch may have that size."""
        sizes = self.issue.sizes
        is_met = not sizes or (sizes == _ONE and not self._is_of_last_batch)
        return self.issue.effect == "wrong" and is_met

    @property
    def is_error(self) -> bool:
        """Return whether this model must not be prepared so."""
        # With the part "memory" a training step may end the process.
        warns = self.only_warns and self.issue.part != "memory"
        return self.is_wrong and self.in_training and not warns

    @property
    def is_met(self) -> bool:
        """Return whether a call in the mode of the model may meet it: not in a backward that does not run."""
        return self.in_training or self.issue.part not in ("gradients", "memory")

    @property
    def _is_of_last_batch(self) -> bool:
        return self.issue.sizes == _ONE and (self.batch or 1) > 1

    def problem(self) -> Problem:
        """Return the issue as a message, with a remedy."""
        names = [name or "the model" for name in self.modules]
        kinds = ", ".join(sorted(set(self.modules.values())))
        code = f"its forward was replaced by {self.unreached}" if self.unreached else "own forward"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        wrong = f"{self.issue.what} [{self.issue.name}]{self._mode()}"
        if self.unreached is not None:
            wrong += f"; {REPAIR_STEP} cannot repair it: {code}"
        return Problem(f"{kinds} ({names[0]}{more})", wrong, self._remedy())

    def _mode(self) -> str:
        if self._is_of_last_batch:
            return f"; this batch has {self.batch} samples, the last batch of an epoch may have one"
        if self.is_error:
            return ", and the model is in training mode"
        is_later = self.is_wrong and not self.in_training
        return "; in training code this is an error" if is_later else ""

    def _remedy(self) -> str:
        if self.unreached:
            cures = [f"prepare the model first, with {REPAIR_STEP}, then replace the forward"]
        elif self.unreached is not None:
            cures = ["call super().forward(...) in its forward"]
        elif self.issue.repair:
            forced = f" with steps.{REPAIR_STEP}.force=true" if self.needs_force else ""
            cures = [f"add the step {REPAIR_STEP}{forced}"]
        else:
            cures = [f"{_CURES[kind]} {cure}" for kind, cure in self.issue.cure]
        if self.is_wrong and not cures:
            cures = ["exclude them, or take another memory format"]
        elif self.issue.is_risk and not self.issue.repair:
            cures.append("look at what the run's verification says, with the sizes you train on")
        if self.is_error:
            word = "ignore" if self.issue.part == "memory" else "warn"
            cures.append(f"go on: known_issues={word}; if it is not trained, {EVAL_MODE}")
        return ", or ".join(cures)


def find_known_issues(
    model: nn.Module,
    table: RequestTable,
    known_issues: KnownIssues,
    amp: str = "none",
    batch: int | None = None,
) -> list[IssueMatch]:
    """Return the known issues of this model after the moves of `table`; errors first.

    Wrong numbers are an error for a model in training mode, and a warning in eval mode or with
    `known_issues="warn"`; what is wrong at batch 1 only is an error unless `batch` is known to be larger.
    With "ignore" nothing is looked up. Under autocast to `amp` float32 becomes that.
    """
    if known_issues == "ignore":
        return []
    formats, own_dtypes, devices = _convolution_weights(table)
    if not devices:
        return []
    dtypes = set().union(*own_dtypes.values())
    if amp != "none":
        for key, own in own_dtypes.items():
            own_dtypes[key] = {amp if name == "float32" else name for name in own}
        # On a CPU autocast casts the inputs of norms, too.
        dtypes = (set() if devices == {"cpu"} else dtypes).union(*own_dtypes.values())
    modules_by_class: dict[str, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        cls: Any = type(module)  # a class is hashable, which mypy denies
        kind = torch_class(cls)  # a user's class may have the name of one of torch
        if kind and has_own_sizes(module):
            modules_by_class.setdefault(kind.__name__, {})[name] = module
    issues = dict.fromkeys(issue for device in sorted(devices) for issue in standing(device))
    matches = []
    for issue in issues:
        force = formats.isdisjoint({*issue.formats} - {"contiguous"})
        meeting: dict[str | None, dict[str, str]] = {}
        for kind in issue.operations:
            for name, module in modules_by_class.get(kind, {}).items():
                concerned = issue.concerns(kind, formats, own_dtypes.get(id(module), dtypes))
                if concerned and ONLY[issue.only](module) and _meets(issue, module):
                    shown = kind if forward_code(module).repaired else type(module).__name__
                    meeting.setdefault(_unreached(issue, module), {})[name] = shown
        for unreached, modules in meeting.items():
            match = IssueMatch(
                issue, modules, model.training, known_issues == "warn", force, unreached, batch
            )
            # Of a user's own forward it is not known that it meets the sizes.
            is_met = unreached != "" or match.is_wrong or not issue.sizes
            if (issue.in_plan and is_met) or (unreached is not None and issue.name == _REFERENCE):
                matches.append(match)
    return sorted(matches, key=lambda match: not match.is_error)


def check_known_issues(known_issues: str) -> None:
    """Raise ConfigError if `known_issues` is not one of error, warn and ignore."""
    if known_issues not in get_args(KnownIssues):
        remedy = choose(str(known_issues), get_args(KnownIssues))
        raise ConfigError("known_issues", f"{known_issues!r} is not allowed", remedy)


def _meets(issue: Issue, module: nn.Module) -> bool:
    """Return whether a module runs torch's code, and none that repairs it."""
    repair = find_repair(issue.repair) if issue.repair else None
    if repair is not None and (repair.mends(module) or not repair.concerns(module)):
        return False
    return forward_code(module).runs_torchs


def _unreached(issue: Issue, module: nn.Module) -> str | None:
    """Return the function or nothing that stands in the place of torch's code; None if a repair fits."""
    if not issue.repair or find_repair(issue.repair).fits(module):
        return None
    return forward_code(module).replaced_by


def _convolution_weights(
    table: RequestTable,
) -> tuple[set[str], dict[int, set[str]], set[str]]:
    """Return the formats, the dtypes by `id(module)` and the device types of convolutions' weights."""
    formats, devices = set(), set()
    dtypes: dict[int, set[str]] = {}
    for request in table.requests:
        tensor, modules = request.tensor, [place.module for place in request.places]
        if not is_strided(tensor) or tensor.dim() not in CHANNELS_LAST:
            continue
        if not (convolutions := [m for m in modules if isinstance(m, CONVOLUTIONS_2D_3D)]):
            continue
        move = request.move()
        stride = move.stride if move and move.stride is not None else tensor.stride()
        formats.add(request.wants.get("memory_format") or _format(tensor.shape, stride))
        dtype = name_of(move.dtype if move else tensor.dtype)
        for module in convolutions:
            dtypes.setdefault(id(module), set()).add(dtype)
        devices.add((move or tensor).device.type)
    return formats - {""}, dtypes, devices


def _format(shape: torch.Size, stride: tuple[int, ...]) -> str:
    """Return the format whose canonical strides these are; empty for any other strides."""
    formats = ("contiguous", CHANNELS_LAST[len(shape)])
    return next((name for name in formats if canonical_stride(shape, name) == stride), "")


def warned_of(issues: list[IssueMatch], *, repairs: bool) -> list[Problem]:
    """Return what a plan warns of; with `repairs` also of what no repair reaches, though only slow."""
    return [
        match.problem()
        for match in issues
        if (match.is_met and not match.is_error)
        and (repairs or match.unreached is None or match.is_wrong)
    ]


def known_errors(issues: list[IssueMatch]) -> list[ConfigError]:
    """Return the errors of `issues`, in one."""
    problems = [match.problem() for match in issues if match.is_error]
    return [KnownIssueError.of(problems)] if problems else []
