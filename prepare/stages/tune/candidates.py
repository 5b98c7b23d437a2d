"""The candidates of a tuning: recipes that may be faster, the unprepared model first.

A recipe has up to one choice for each part: a precision, a layout with repairs, replaced calls and formatted
inputs, a fusion, a compiler. The steps say what they offer for their part (`Step.recipe_part`,
`Step.offers`).

The cost of a recipe is its complexity: the sum of the costs of its steps (`Step.cost`). Of two recipes the
one with the lower cost is the simpler one. Formats and formatted inputs change no value (1 each); repairs
change a module's class (2); replaced calls change its code, and fusing makes new parameters (3 each); 16 bits
round every value (4; with more modules kept than norms 1 more); a compiler is needed at run time (6), and
freezing or another backend than inductor ties the model to its weights (1 more).
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from prepare.core.forward.autocast import Amp, device_of
from prepare.core.model.known_issues import standing
from prepare.errors import PrepareError
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.stages.tune.records import UNPREPARED, Steps
from prepare.step import Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn


AS_DECLARED = "as declared"
_FLAT = "contiguous"


class Choice(NamedTuple):
    """A part of a recipe: its name in the recipe's name, and its steps; both empty for no change."""

    name: str
    steps: Mapping[str, Any]

    @property
    def is_frozen(self) -> bool:
        """Return whether a compiler makes constants of the weights."""
        return any(options.get("freezing") for options in self.steps.values())


_NO_CHANGE = Choice("", {})


@dataclass(frozen=True)
class Candidate:
    """A named pipeline as plain data, with every option."""

    name: str
    steps: Steps

    @cached_property
    def cost(self) -> int:
        """The complexity of the recipe; see the module."""
        return sum(
            STEPS[name].from_options(options).cost() if name in STEPS else Step.complexity
            for name, options in self.steps.items()
        )

    def part(self, part: str) -> Steps:
        """Return its steps that are this part of a recipe."""
        return {name: options for name, options in self.steps.items() if _part(name) == part}

    @cached_property
    def compiles(self) -> bool:
        """Return whether it uses a compiler, so that its first call takes long."""
        return bool(self.part("compiler"))

    @property
    def precision(self) -> str | None:
        """The dtype that the recipe casts to, or None."""
        return next((each.get("dtype") for each in self.part("precision").values()), None)

    @cached_property
    def compiler(self) -> str:
        """The steps that compile, with their options, as one text."""
        return json.dumps(self.part("compiler"))

    @cached_property
    def eager(self) -> str:
        """The other steps as one text: the same for candidates that differ only in the compiler."""
        compiler = self.part("compiler")
        rest = {name: options for name, options in self.steps.items() if name not in compiler}
        return json.dumps(rest, sort_keys=True)


def candidates(
    model: nn.Module,
    *,
    declared: Mapping[str, Any],
    allow: tuple[str, ...],
    mode: str,
    amp: str = "none",
    calls: tuple[str, ...] = (),
) -> list[Candidate]:
    """Return the unprepared model, the declared pipeline, and recipes, the most promising first.

    The steps of `declared` that concern the whole process, or decide where everything runs, are part of all
    of them. `model` is inspected in its present mode and not changed. `calls` are those of the model's own
    code that a step can replace, see `calls_to_keep`.
    """

    def offered(part: str) -> list[Choice]:
        return _offered(model, part, allow=allow, mode=mode)

    common = {name: options for name, options in declared.items() if _part(name) == "common"}
    recipes = [Candidate(UNPREPARED, _resolved(common))]
    if any(options is not None for name, options in declared.items() if name not in common):
        recipes.append(Candidate(AS_DECLARED, _resolved(declared)))
    inputs, (repair, repair_all) = offered("inputs")[0], offered("repair")[:2]
    layouts = list(_layouts(model, calls, inputs, repair))
    combined = partial(_combined, Choice("", common), inputs)
    fusions = [each for each in offered("fusion") if _has_effect(model, each.steps)]
    risky = _risky_dtypes(model, recipes[0], amp) if mode == "train" else set()
    safe = partial(_safe_layouts, layouts, risky=risky, inputs=inputs, repair=repair_all)
    low = offered("precision")
    precisions = [*low[:1], _NO_CHANGE, *low[1:]]
    for precision in precisions:
        for layout in safe(precision):
            for fusion in (*fusions, _NO_CHANGE):
                recipes += combined(precision, layout, fusion)
    best_fusion, compilers = next(iter(fusions), _NO_CHANGE), offered("compiler")
    for precision in precisions:
        for compiler in compilers:
            # With freezing norms are fused anyway.
            fusion = _NO_CHANGE if compiler.is_frozen else best_fusion
            for layout in _compiled_layouts(safe(precision), mode):
                recipes += combined(precision, layout, fusion, compiler)
    # The first of equal recipes stays.
    distinct = {json.dumps(recipe.steps): recipe for recipe in reversed(recipes)}
    return list(distinct.values())[::-1]


def calls_to_keep(model: nn.Module, batch: Any, *, mode: str, amp: Amp = "none") -> tuple[str, ...]:
    """Return the calls of the model's own code that a step can replace; changes the model."""
    formats = next((choice.steps for choice in _formats(model)), {})
    rewriter = next(_steps_of("calls"), None)
    if not formats or rewriter is None:
        return ()
    repairs, inputs = (_offered(model, part)[0].steps for part in ("repair", "inputs"))
    pipeline = Pipeline.from_config({**repairs, **formats, **{name: {} for name in inputs}})
    pipeline.apply(model, strict=False, known_issues="ignore")
    example = pipeline.format(batch)
    step, _ = rewriter().for_example(model, example, backward=mode == "train", amp=amp)
    return step.calls if isinstance(step.calls, tuple) else ()


def _part(name: str) -> str:
    """Return the part of a recipe that a step is; empty for none, and for a step that is not installed."""
    with suppress(PrepareError):
        return STEPS[name].recipe_part
    return ""


def _steps_of(part: str) -> Iterator[type[Any]]:
    """Yield the installed steps that are this part of a recipe."""
    return (STEPS[name] for name in STEPS if _part(name) == part)


def _offered(
    model: nn.Module, part: str, *, allow: tuple[str, ...] = (), mode: str = ""
) -> list[Choice]:
    """Return what the installed steps offer for a part of the recipe."""
    return [
        Choice(offer.word, {**offer.needs, step.name: offer.options})
        for step in _steps_of(part)
        for offer in step.offers(model, allow=allow, mode=mode)
    ]


def _layouts(
    model: nn.Module, calls: tuple[str, ...], inputs: Choice, repair: Choice
) -> Iterator[Choice]:
    """Yield memory formats, each with and without repairs and formatted inputs; then no change.

    Calls are replaced only where inputs are formatted.
    """
    keep = {step.name: {"calls": list(calls)} for step in _steps_of("calls")}
    for word, formats in _formats(model):
        is_useful = _has_effect(model, {**formats, **repair.steps})
        for name, repairs in (repair, _NO_CHANGE) if is_useful else (_NO_CHANGE,):
            words, both = [word, inputs.name, name], {**formats, **inputs.steps}
            if calls and word != _FLAT:
                yield Choice(_joined([*words, "keep"]), {**repairs, **keep, **both})
            yield Choice(_joined(words), {**repairs, **both})
            yield Choice(_joined([word, name]), {**repairs, **formats})
    yield _NO_CHANGE


def _formats(model: nn.Module) -> Iterator[Choice]:
    """Yield channels-last for the ranks of convolutions in the model; contiguous if that changes it."""
    offered = _offered(model, "layout")
    last = [each for each in offered if each.name != _FLAT]
    if len(last) > 1:
        yield Choice("by_rank", _merged(last))
    yield from last
    flat = _merged(each for each in offered if each.name == _FLAT)
    if flat and Pipeline.from_config(flat).plan(model, known_issues="ignore"):
        yield Choice(_FLAT, flat)


def _risky_dtypes(model: nn.Module, base: Candidate, amp: str) -> set[str | None]:
    """Return dtypes in which known issues may corrupt gradients or memory unless modules are repaired.

    None is among them if autocast casts to one: whatever the parameters are.
    """
    declared = (each["device"] for each in base.steps.values() if "device" in each)
    device = next(declared, device_of([model]).type)
    kinds = {type(module).__name__ for module in model.modules()}
    risky: set[str | None] = {
        dtype
        for issue in standing(device)
        if issue.is_risk and issue.repair and not kinds.isdisjoint(issue.operations)
        for dtype in issue.dtypes
    }
    return risky | ({None} if amp in risky else set())


def _safe_layouts(
    layouts: list[Choice],
    precision: Choice,
    *,
    risky: set[str | None],
    inputs: Choice,
    repair: Choice,
) -> list[Choice]:
    """Return the layouts to try in a precision; if it is risky, all with repairs and formatted inputs."""
    if next((options["dtype"] for options in precision.steps.values()), None) not in risky:
        return layouts
    repaired = {}
    for name, steps in layouts:
        is_repaired = not repair.steps.keys().isdisjoint(steps)
        word = _joined([name, "" if is_repaired else repair.name])
        repaired[word] = {**steps, **inputs.steps, **repair.steps}
    return [Choice(name, steps) for name, steps in repaired.items()]


def _compiled_layouts(layouts: list[Choice], mode: str) -> list[Choice]:
    """Return the layouts to compile: no change, and the first format.

    A compiler chooses layouts itself. In eval mode repairs are left out; in training they stay, as known
    issues of eager gradients would otherwise refuse the recipe.
    """
    avoided = {"calls"} if mode == "train" else {"calls", "repair"}
    *formats, unchanged = layouts
    plain = [each for each in formats if avoided.isdisjoint(map(_part, each.steps))]
    return [unchanged, *plain[:1]]


def _combined(
    common: Choice,
    inputs: Choice,
    precision: Choice,
    layout: Choice,
    fusion: Choice,
    *others: Choice,
) -> Iterator[Candidate]:
    """Yield the recipe of these choices, unless it is empty or the same as another one."""
    name = layout.name
    if precision.name:
        if layout.name and inputs.steps.keys().isdisjoint(layout.steps):
            return  # 16 bits need a cast of the input: the same as the layout with formatted inputs
        name, others = name.replace(f" + {inputs.name}", ""), (*others, inputs)
    words = [precision.name, name, *(each.name for each in (fusion, *others) if each is not inputs)]
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
