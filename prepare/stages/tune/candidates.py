"""The candidates of a tuning: recipes that may be faster, the unprepared model first.

A recipe has up to one choice for each part: a precision, a layout with repairs, replaced calls and formatted
inputs, a fusion, a compiler. What is offered for each part stands here, for the built-in steps. A step of
another package is tried where the user has declared it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from prepare.core.forward.torch_state import device_of
from prepare.core.model.known_issues import standing
from prepare.errors import PrepareError
from prepare.patterns import exactly
from prepare.pipeline import Pipeline
from prepare.stages.tune.records import UNPREPARED, Steps
from prepare.steps.repairs import find_rewrite

if TYPE_CHECKING:
    from torch import nn


AS_DECLARED = "as declared"
# Steps that concern the whole process, or decide where everything runs: they are part of every recipe.
_COMMON = ("device", "backends")
_FORMATS = {2: "conv2d_memory_format", 3: "conv3d_memory_format"}
# How much a step adds to the complexity of a recipe; others add 3. Formats and formatted inputs change no
# value, repairs and rewrites change a module's class, 16 bits round every value, and a compiler is needed at
# run time.
_COSTS = {"device": 0, "backends": 0, "eval_mode": 0, "input_format": 1, "half": 4, "compile": 6}
_COSTS |= {"repair_layout": 2, "rewrite_conv": 2} | dict.fromkeys(_FORMATS.values(), 1)
_OTHER_COST = 3


class Choice(NamedTuple):
    """A part of a recipe: its name in the recipe's name, and its steps; both empty for no change."""

    name: str
    steps: Mapping[str, Any]


_NO_CHANGE = Choice("", {})
_INPUT = Choice("input", {"input_format": {"attach": True}})
_REPAIR = Choice("repair", {"repair_layout": {}})
_REPAIR_ALL = Choice("repair", {"repair_layout": {"force": True}})
_KEEP = Choice("keep", {"keep_layout": {}})
_FUSE = Choice("fuse", {"eval_mode": {}, "fuse_conv_bn": {}})
_PACK = Choice("packed", {"eval_mode": {}, "fuse_inference": {}})
_FROZEN = Choice("frozen compile", {"compile": {"freezing": True}})
_COMPILE = Choice("compile", {"compile": {}})
# The faster first: float16 is very slow on a CPU.
_LOW = {
    "bfloat16": Choice("bfloat16", {"half": {"dtype": "bfloat16"}}),
    "half": Choice("half", {"half": {"dtype": "float16"}}),
}


@dataclass(frozen=True)
class Candidate:
    """A named pipeline as plain data, with every option."""

    name: str
    steps: Steps

    @cached_property
    def cost(self) -> int:
        """The complexity of the recipe: of two that are about as fast the simpler one wins."""
        frozen = self.steps.get("compile", {}).get("freezing", False)  # ties it to its weights
        return sum(_COSTS.get(name, _OTHER_COST) for name in self.steps) + frozen


def candidates(
    model: nn.Module,
    *,
    declared: Mapping[str, Any],
    allow: tuple[str, ...],
    mode: str,
    amp: str = "none",
) -> list[Candidate]:
    """Return the unprepared model, the declared pipeline, and recipes, the most promising first.

    The steps of `declared` that concern the whole process, or decide where everything runs, are part of all
    of them. `model` is inspected in its present mode and not changed.
    """
    common = {name: options for name, options in declared.items() if name in _COMMON}
    recipes, late = [Candidate(UNPREPARED, _resolved(common))], list[Candidate]()
    if any(options is not None for name, options in declared.items() if name not in common):
        recipes.append(Candidate(AS_DECLARED, _resolved(declared)))
    layouts, combined = list(_layouts(model)), partial(_combined, Choice("", common))
    fusions = [each for each in _fusions(model, mode) if _has_effect(model, each.steps)]
    risky = _risky_dtypes(model, recipes[0], amp) if mode == "train" else set()
    low = [choice for word, choice in _LOW.items() if word in allow]
    choices, compiled = [*fusions, _NO_CHANGE], [_COMPILE] if "compile" in allow else []
    plain = next(each for each in choices if each is not _PACK)
    frozen = [_FROZEN] if compiled and mode == "eval" else []
    eager: list[list[Candidate]] = []
    for precision in (*low[:1], _NO_CHANGE, *low[1:]):
        # In a risky precision, all layouts have repairs and formatted inputs.
        is_risky = precision.steps.get("half", {}).get("dtype") in risky
        tried = _repaired(layouts) if is_risky else layouts
        # Without a layout that inputs have too, nothing is packed.
        mixed = [
            (layout, choice)
            for layout, choice in product(tried, choices)
            if choice is not _PACK or "input_format" in layout.steps
        ]
        eager.append([one for pair in mixed for one in combined(precision, *pair)])
        # With freezing norms are fused anyway.
        ways = [(_NO_CHANGE, each) for each in frozen] + [(plain, each) for each in compiled]
        for layout, way in product(_compiled_layouts(tried, mode), ways):
            late += combined(precision, layout, *way)
    # Each precision has its turn, as there may be no time for all.
    recipes += [each for turn in zip_longest(*eager) for each in turn if each] + late
    # The first of equal recipes stays.
    distinct = {json.dumps(recipe.steps): recipe for recipe in reversed(recipes)}
    return list(distinct.values())[::-1]


def _layouts(model: nn.Module) -> Iterator[Choice]:
    """Yield memory formats, each with and without repairs and formatted inputs; then no change.

    Calls of the model's own code are replaced only where inputs are formatted.
    """
    for word, formats in _formats(model):
        is_useful = _has_effect(model, {**formats, **_REPAIR.steps})
        keeps = _has_effect(model, {**formats, **_KEEP.steps})
        for name, repairs in (_REPAIR, _NO_CHANGE) if is_useful else (_NO_CHANGE,):
            words, both = [word, _INPUT.name, name], {**formats, **_INPUT.steps}
            if keeps:
                yield Choice(_joined([*words, _KEEP.name]), {**repairs, **_KEEP.steps, **both})
            yield Choice(_joined(words), {**repairs, **both})
            yield Choice(_joined([word, name]), {**repairs, **formats})
    yield _NO_CHANGE


def _formats(model: nn.Module) -> Iterator[Choice]:
    """Yield channels-last for the ranks of convolutions in the model."""
    from torch import nn

    classes = {2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}
    words = {2: "channels_last", 3: "channels_last_3d"}
    ranks = [rank for rank in words if any(isinstance(m, classes[rank]) for m in model.modules())]
    last = [Choice(words[rank], {_FORMATS[rank]: {}}) for rank in ranks]
    if len(last) > 1:
        yield Choice("by_rank", _merged(last))
    yield from last


def _fusions(model: nn.Module, mode: str) -> Iterator[Choice]:
    """Yield norms fused into convolutions, and patch embeddings as products."""
    if mode == "eval":
        yield _FUSE
        if device_of([model]).type == "cpu":
            yield _PACK
    linear = find_rewrite("linear")
    if names := [name for name, module in model.named_modules() if linear.fits(module)]:
        yield Choice("rewrite", {"rewrite_conv": {"linear": [*map(exactly, names)]}})


def _risky_dtypes(model: nn.Module, base: Candidate, amp: str) -> set[str | None]:
    """Return dtypes in which known issues may corrupt gradients or memory unless modules are repaired.

    None is among them if autocast casts to one: whatever the parameters are.
    """
    device = base.steps.get("device", {}).get("device") or device_of([model]).type
    kinds = {type(module).__name__ for module in model.modules()}
    issues = (each for each in standing(device) if each.is_risk and each.repair)
    hit = (each.dtypes for each in issues if not kinds.isdisjoint(each.operations))
    risky: set[str | None] = {dtype for dtypes in hit for dtype in dtypes}
    return risky | ({None} if amp in risky else set())


def _repaired(layouts: list[Choice]) -> list[Choice]:
    """Return the layouts with formatted inputs and all repairs, each once."""
    repaired = {}
    for name, steps in layouts:
        word = _joined([name, "" if "repair_layout" in steps else _REPAIR.name])
        repaired[word] = {**steps, **_INPUT.steps, **_REPAIR_ALL.steps}
    return [Choice(name, steps) for name, steps in repaired.items()]


def _compiled_layouts(layouts: list[Choice], mode: str) -> list[Choice]:
    """Return the layouts to compile: no change, and the first format.

    A compiler chooses layouts itself. In eval mode repairs are left out; in training they stay, as known
    issues of eager gradients would otherwise refuse the recipe.
    """
    avoided = {"keep_layout"} if mode == "train" else {"keep_layout", "repair_layout"}
    *formats, unchanged = layouts
    plain = [each for each in formats if avoided.isdisjoint(each.steps)]
    return [unchanged, *plain[:1]]


def _combined(
    common: Choice, precision: Choice, layout: Choice, fusion: Choice, *others: Choice
) -> Iterator[Candidate]:
    """Yield the recipe of these choices, unless it is empty or the same as another one."""
    name = layout.name
    if precision.name:
        if layout.name and "input_format" not in layout.steps:
            return  # 16 bits need a cast of the input: the same as the layout with formatted inputs
        name, others = name.replace(f" + {_INPUT.name}", ""), (*others, _INPUT)
    words = [precision.name, name, *(each.name for each in (fusion, *others) if each is not _INPUT)]
    if any(words):
        steps = _merged((fusion, common, precision, layout, *others))
        yield Candidate(_joined(words), _resolved(steps))


def _joined(words: Iterable[str]) -> str:
    return " + ".join(filter(None, words))


def _merged(choices: Iterable[Choice]) -> Steps:
    return {name: options for each in choices for name, options in each.steps.items()}


def _has_effect(model: nn.Module, steps: Mapping[str, Any]) -> bool:
    """Return whether the last of the steps would change the model."""
    try:
        plan = Pipeline.from_config(steps).plan(model, known_issues="ignore")
    except PrepareError:
        return False
    return any(action.step == list(steps)[-1] for action in plan.actions)


def _resolved(steps: Mapping[str, Any]) -> Steps:
    """Return the steps with every option."""
    return Pipeline.from_config(steps).to_config()
