"""The candidates of a tuning: recipes that may be faster, the unprepared model first.

The cost of a recipe is its complexity: the sum of the costs of its steps. Of two recipes the one with
the lower cost is the simpler one. Formats and formatted inputs change no value (1 each); repairs change
a module's class (2); replaced calls change its code, and fusing makes new parameters (3 each); 16 bits
round every value (4; with more modules kept than norms 1 more), and 8 bits more (6); a compiler is needed at
run time (6), and freezing or another backend than inductor ties the model to its weights (1 more).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from prepare.core.model.known_issues import standing
from prepare.errors import PrepareError
from prepare.patterns import NORMS
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.tune.records import UNPREPARED, Steps

if TYPE_CHECKING:
    from prepare.core.forward.autocast import Amp

AS_DECLARED = "as declared"
_COSTS = {
    "device": 0,
    "backends": 0,
    "eval_mode": 0,
    "conv2d_memory_format": 1,
    "conv3d_memory_format": 1,
    "input_format": 1,
    "repair_layout": 2,
    "keep_layout": 3,
    "fuse_conv_bn": 3,
    "half": 4,
    "quantize": 6,
    "compile": 6,
}
_UNKNOWN_COST = 3
# Steps that concern the whole process, or decide where everything runs.
_COMMON = ("device", "backends")
_RANKS = {2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}
_INPUT: Steps = {"input_format": {"attach": True}}
_REPAIR: Steps = {"repair_layout": {}}
_REPAIR_ALL: Steps = {"repair_layout": {"force": True}}
_QUANTIZE: Mapping[str, Steps] = {
    "quantize": {"quantize": {}},
    "quantize dynamic": {"quantize": {"scheme": "int8_dynamic"}},
}
_FUSE: Steps = {"eval_mode": {}, "fuse_conv_bn": {}}


class Choice(NamedTuple):
    """A part of a recipe: its name in the recipe's name, and its steps; both empty for no change."""

    name: str
    steps: Mapping[str, Any]


_NO_CHANGE = Choice("", {})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A named pipeline as plain data, with every option."""

    name: str
    steps: Steps

    @property
    def cost(self) -> int:
        """The complexity of the recipe; see the module."""
        compiler = self.steps.get("compile", {})
        tied = compiler.get("freezing", False) or compiler.get("backend", "inductor") != "inductor"
        keeps = self.steps.get("half", {}).get("keep", NORMS) not in (NORMS, [NORMS], [])
        return sum(_COSTS.get(name, _UNKNOWN_COST) for name in self.steps) + bool(tied) + keeps

    @property
    def compiles(self) -> bool:
        """Return whether it uses a compiler, so that its first call takes long."""
        return "compile" in self.steps

    @property
    def precision(self) -> str | None:
        """The dtype that it casts to, or None."""
        return self.steps.get("half", {}).get("dtype")

    @property
    def compiler(self) -> str:
        """A key of its compiler and options."""
        return json.dumps(self.steps.get("compile"))

    @property
    def eager(self) -> str:
        """A key of its other steps: the same for candidates that differ only in the compiler."""
        return json.dumps({k: v for k, v in self.steps.items() if k != "compile"}, sort_keys=True)


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

    The steps `device` and `backends` of `declared` are part of all of them. `model` is inspected in its
    present mode and not changed. `calls` are those that the step keep_layout can replace.
    """
    base = {name: options for name, options in declared.items() if name in _COMMON}
    recipes = [Candidate(UNPREPARED, _resolved(base))]
    if any(options is not None for name, options in declared.items() if name not in _COMMON):
        recipes.append(Candidate(AS_DECLARED, _resolved(declared)))
    layouts, fusible = list(_layouts(model, calls)), mode == "eval" and _has_effect(model, _FUSE)
    device = next((p.device.type for p in model.parameters()), "cpu")
    device = recipes[0].steps.get("device", {}).get("device", device)
    risky = _risky_dtypes(model, device) if mode == "train" else set()
    if amp in risky:  # autocast casts to it, whatever the parameters are
        risky.add(None)
    for precision in _precisions(allow, device):
        for layout in _safe_layouts(layouts, precision, risky):
            for fuse in (True, False) if fusible else (False,):
                recipes += _combined(base, precision, layout, fuse=fuse)
    blocks = _repeated_blocks(model) if "compile" in allow else ""
    for precision in _precisions(allow, device):
        for compiler in _compilers(allow, mode, blocks):
            # With freezing norms are fused anyway.
            fuse = fusible and compiler.name.startswith("compile")
            safe = _safe_layouts(layouts, precision, risky)
            for layout in _compiled_layouts(safe, mode):
                recipes += _combined(base, precision, layout, fuse=fuse, compiler=compiler)
    for quantizer in _quantizers(model, allow, mode):
        for precision in _precisions(allow, device):
            for compiler in (_NO_CHANGE, *_unfrozen(_compilers(allow, mode, blocks))):
                for layout in _compiled_layouts(layouts, mode):
                    recipes += _combined(
                        base,
                        precision,
                        layout,
                        fuse=fusible,
                        compiler=compiler,
                        quantizer=quantizer,
                    )
    # The first of equal recipes stays.
    distinct = {json.dumps(recipe.steps): recipe for recipe in reversed(recipes)}
    return list(distinct.values())[::-1]


def _layouts(model: nn.Module, calls: tuple[str, ...]) -> Iterator[Choice]:
    """Yield memory formats, each with and without repairs and formatted inputs; then no change.

    Calls are replaced only where inputs are formatted.
    """
    keep: Steps = {"keep_layout": {"calls": list(calls)}}
    for word, formats in _formats(model):
        repairable = _has_effect(model, {**formats, **_REPAIR}, "repair_layout")
        for repairs in (_REPAIR, {}) if repairable else ({},):
            words = [word, "input", "repair" if repairs else ""]
            if calls and word != "contiguous":
                yield Choice(_joined([*words, "keep"]), {**repairs, **keep, **formats, **_INPUT})
            yield Choice(_joined(words), {**repairs, **formats, **_INPUT})
            words[1] = ""
            yield Choice(_joined(words), {**repairs, **formats})
    yield _NO_CHANGE


def calls_to_keep(model: nn.Module, batch: Any, *, mode: str, amp: Amp = "none") -> tuple[str, ...]:
    """Return the calls of the model's own code that keep_layout can replace; changes the model."""
    from prepare.steps.keeping.choose_calls import choose_calls

    formats = next((choice.steps for choice in _formats(model)), {})
    if not formats:
        return ()
    pipeline = Pipeline.from_config({**_REPAIR, **formats, "input_format": {}})
    pipeline.apply(model, strict=False, known_issues="ignore")
    example = pipeline.format(batch)
    return choose_calls(model, example, backward=mode == "train", amp=amp).names


def _formats(model: nn.Module) -> Iterator[Choice]:
    """Yield channels-last for the ranks of convolutions in the model; contiguous if that changes it."""
    ranks = [r for r, kinds in _RANKS.items() if any(isinstance(m, kinds) for m in model.modules())]
    last: dict[int, Steps] = {rank: {f"conv{rank}d_memory_format": {}} for rank in ranks}
    if len(ranks) == 2:
        yield Choice("by_rank", {**last[2], **last[3]})
    for rank in ranks:
        yield Choice("channels_last" if rank == 2 else "channels_last_3d", last[rank])
    flat = {name: {"memory_format": "contiguous"} for steps in last.values() for name in steps}
    if flat and Pipeline.from_config(flat).plan(model, known_issues="ignore"):
        yield Choice("contiguous", flat)


def _risky_dtypes(model: nn.Module, device: str) -> set[str | None]:
    """Return dtypes in which known issues may corrupt gradients or memory unless modules are repaired."""
    kinds = {type(module).__name__ for module in model.modules()}
    return {
        dtype
        for issue in standing(device)
        if issue.is_risk and issue.repair and not kinds.isdisjoint(issue.operations)
        for dtype in issue.dtypes
    }


def _safe_layouts(layouts: list[Choice], precision: Choice, risky: set[str | None]) -> list[Choice]:
    """Return the layouts to try in a precision; if it is risky, all with repairs and formatted inputs."""
    if precision.steps.get("half", {}).get("dtype") not in risky:
        return layouts
    repaired = {}
    for name, steps in layouts:
        words = [name, "" if "repair_layout" in steps else "repair"]
        repaired[_joined(words)] = {**steps, **_INPUT, **_REPAIR_ALL}
    return [Choice(name, steps) for name, steps in repaired.items()]


def _precisions(allow: tuple[str, ...], device: str) -> list[Choice]:
    """Return the allowed precisions, the fastest first: float16 is very slow on a CPU."""
    words = {"bfloat16": "bfloat16", "half": "float16"}
    low = [Choice(w, {"half": {"dtype": words[w]}}) for w in sorted(words) if w in allow]
    if device == "cpu":
        low.sort(key=lambda choice: choice.name == "half")
    return [*low[:1], _NO_CHANGE, *low[1:]]


def _repeated_blocks(model: nn.Module) -> str:
    """Return the class of the largest block that occurs more than once; empty without one.

    A block has at least two modules without children, and is not a container of torch.
    """
    inside: dict[type, list[int]] = {}
    for module in model.modules():
        leaves = sum(not child._modules for child in module.modules())
        if module is not model and leaves > 1 and not type(module).__module__.startswith("torch."):
            inside.setdefault(type(module), []).append(leaves)
    repeated = {cls: sum(counts) for cls, counts in inside.items() if len(counts) > 1}
    return max(repeated, key=lambda cls: repeated[cls]).__name__ if repeated else ""


def _compilers(allow: tuple[str, ...], mode: str, blocks: str) -> Iterator[Choice]:
    """Yield the allowed compilers, the fastest first.

    `blocks` is the class of repeated blocks, which may be compiled alone.
    """
    if "compile" not in allow:
        return
    if mode == "eval":
        yield Choice("frozen compile", {"compile": {"freezing": True}})
    yield Choice("compile", {"compile": {}})
    if blocks:
        yield Choice(f"compile {blocks}", {"compile": {"include": [f"type:{blocks}"]}})


def _quantizers(model: nn.Module, allow: tuple[str, ...], mode: str) -> list[Choice]:
    """Return the ways to store weights in 8 bits, if that is allowed and the model has such weights."""
    if "quantize" not in allow or mode == "train":
        return []
    return [Choice(n, steps) for n, steps in _QUANTIZE.items() if _has_effect(model, steps)]


def _unfrozen(compilers: Iterable[Choice]) -> list[Choice]:
    """Return the compilers to try with weights in 8 bits: inductor, and without freezing to try fewer."""
    return [each for each in compilers if not each.steps["compile"].get("freezing")]


def _compiled_layouts(layouts: list[Choice], mode: str) -> list[Choice]:
    """Return the layouts to compile: no change, and the first format.

    A compiler chooses layouts itself. In eval mode repairs are left out; in training they stay, as known
    issues of eager gradients would otherwise refuse the recipe.
    """
    *formats, unchanged = [each for each in layouts if "keep_layout" not in each.steps]
    plain = [each for each in formats if mode == "train" or "repair_layout" not in each.steps]
    return [unchanged, *plain[:1]]


def _combined(
    base: Mapping[str, Any],
    precision: Choice,
    layout: Choice,
    *,
    fuse: bool,
    compiler: Choice = _NO_CHANGE,
    quantizer: Choice = _NO_CHANGE,
) -> Iterator[Candidate]:
    """Yield the recipe of these choices, unless it is empty or the same as another one."""
    inputs: Steps = {}
    name = layout.name
    if precision.name:
        if layout.name and "input_format" not in layout.steps:
            return  # 16 bits need a cast of the input: the same as the layout with formatted inputs
        inputs, name = _INPUT, name.replace(" + input", "")
    words = [precision.name, name, "fuse" if fuse else "", quantizer.name, compiler.name]
    if any(words):
        before, changed = _FUSE if fuse else {}, {**layout.steps, **quantizer.steps}
        parts = (before, base, precision.steps, changed, compiler.steps, inputs)
        merged = {step: options for part in parts for step, options in part.items()}
        yield Candidate(_joined(words), _resolved(merged))


def _joined(words: Iterable[str]) -> str:
    return " + ".join(filter(None, words))


def _has_effect(model: nn.Module, steps: Mapping[str, Any], name: str = "") -> bool:
    """Return whether the step `name`, by default the last one, would change the model."""
    name = name or list(steps)[-1]
    if not all(step in STEPS for step in steps):
        return False
    try:
        plan = Pipeline.from_config(steps).plan(model, known_issues="ignore")
    except PrepareError:
        return False
    return any(action.step == name for action in plan.actions)


def _resolved(steps: Mapping[str, Any]) -> Steps:
    """Return the steps with every option."""
    return Pipeline.from_config(steps).to_config()
