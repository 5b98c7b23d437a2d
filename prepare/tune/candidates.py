"""Which recipes are worth a try for a model: pipelines as plain data, the unprepared model first.

What counts as simple: a recipe costs what its steps cost, and the one that costs less is the simpler
one. Formats and formatted inputs change no value (1 each); repairs change a module's class (2);
fusing makes new parameters (3); 16 bits round every number (4); a compiler comes along at run time
(6), and freezing or another backend than inductor ties the model to its weights (1 more).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from prepare.core.model.known_issues import standing
from prepare.errors import PrepareError
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.tune.records import UNPREPARED, Steps

AS_DECLARED = "as declared"
_COSTS = {
    "device": 0,
    "eval_mode": 0,
    "conv2d_memory_format": 1,
    "conv3d_memory_format": 1,
    "input_format": 1,
    "repair_layout": 2,
    "fuse_conv_bn": 3,
    "half": 4,
    "compile": 6,
}
_UNKNOWN_COST = 3
_RANKS = {2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}
_INPUT = {"input_format": {"attach": True}}
_REPAIR = {"repair_layout": {}}
_REPAIR_ALL = {"repair_layout": {"force": True}}
_FUSE = {"eval_mode": {}, "fuse_conv_bn": {}}

Choice = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline under a name, every option spelt out."""

    name: str
    steps: Steps

    @property
    def cost(self) -> int:
        """How far it is from simple."""
        compiler = self.steps.get("compile", {})
        more = compiler.get("freezing", False) or compiler.get("backend", "inductor") != "inductor"
        return sum(_COSTS.get(name, _UNKNOWN_COST) for name in self.steps) + bool(more)

    @property
    def compiles(self) -> bool:
        """Whether its first call takes long."""
        return "compile" in self.steps

    @property
    def precision(self) -> str | None:
        """The dtype it casts to; None where it casts nothing."""
        return self.steps.get("half", {}).get("dtype")

    @property
    def compiler(self) -> str:
        """The same for the candidates that differ in all but the compiler."""
        return json.dumps(self.steps.get("compile"))

    @property
    def eager(self) -> str:
        """The same for the candidates that differ in the compiler alone."""
        return json.dumps({k: v for k, v in self.steps.items() if k != "compile"}, sort_keys=True)


def candidates(
    model: nn.Module, *, declared: Mapping[str, Any], allow: tuple[str, ...], mode: str
) -> list[Candidate]:
    """The unprepared model, what was declared, and what may be faster; the most promising first.

    The `device` step of `declared` is part of all of them. `model` is looked at in the mode that it
    is in, and nothing of it is touched.
    """
    base = {name: options for name, options in declared.items() if name == "device"}
    found = [Candidate(UNPREPARED, _resolved(base))]
    if any(options is not None for name, options in declared.items() if name != "device"):
        found.append(Candidate(AS_DECLARED, _resolved(declared)))
    layouts, fusing = list(_layouts(model)), mode == "eval" and _acts(model, _FUSE)
    device = next((p.device.type for p in model.parameters()), "cpu")
    device = found[0].steps.get("device", {}).get("device", device)
    risky = _risky(model, device) if mode == "train" else set()
    for precision in _precisions(allow, device):
        for layout in _repaired(layouts, precision, risky):
            for fuse in (True, False) if fusing else (False,):
                found += _made(base, precision, layout, fuse=fuse)
    for precision in _precisions(allow, device):
        for compiler in _compilers(precision, allow, mode):
            # Frozen, and by OpenVINO, norms are fused anyway.
            fuse = fusing and compiler[0] == "compile"
            repaired = _repaired(layouts, precision, risky)
            for layout in _compiled_layouts(repaired, compiler[0], mode):
                found += _made(base, precision, layout, fuse=fuse, compiler=compiler)
    return list({json.dumps(each.steps): each for each in reversed(found)}.values())[::-1]


def _layouts(model: nn.Module) -> Iterator[Choice]:
    """Names and steps: the formats by rank, each with inputs formatted and repairs or without; none."""
    for word, formats in _formats(model):
        repair = _acts(model, {**formats, **_REPAIR}, "repair_layout")
        for repairs in (_REPAIR, {}) if repair else ({},):
            for inputs in (_INPUT, {}):
                words = [word, "input" if inputs else "", "repair" if repairs else ""]
                yield " + ".join(filter(None, words)), {**repairs, **formats, **inputs}
    yield "", {}


def _formats(model: nn.Module) -> Iterator[Choice]:
    """Channels-last of the ranks that are there; contiguous where something lies otherwise."""
    there = [r for r, kinds in _RANKS.items() if any(isinstance(m, kinds) for m in model.modules())]
    last = {rank: {f"conv{rank}d_memory_format": {}} for rank in there}
    if len(there) == 2:
        yield "by_rank", {**last[2], **last[3]}
    for rank in there:
        yield "channels_last" if rank == 2 else "channels_last_3d", last[rank]
    flat = {name: {"memory_format": "contiguous"} for step in last.values() for name in step}
    if flat and Pipeline.from_config(flat).plan(model, known_issues="ignore"):
        yield "contiguous", flat


def _risky(model: nn.Module, device: str) -> set[str]:
    """The dtypes in which this model's gradients may be garbage, and memory overwritten, without a repair."""
    kinds = {type(module).__name__ for module in model.modules()}
    return {
        dtype
        for issue in standing(device)
        if issue.effect == "risk" and issue.repair and not kinds.isdisjoint(issue.operations)
        for dtype in issue.dtypes
    }


def _repaired(layouts: list[Choice], precision: Choice, risky: set[str]) -> list[Choice]:
    """The layouts to try in a precision: where that is risky, all with repairs, and with inputs that fit."""
    if precision[1].get("half", {}).get("dtype") not in risky:
        return layouts
    found = {}
    for name, steps in layouts:
        words = [name, "" if "repair_layout" in steps else "repair"]
        found[" + ".join(filter(None, words))] = {**steps, **_INPUT, **_REPAIR_ALL}
    return list(found.items())


def _precisions(allow: tuple[str, ...], device: str) -> list[Choice]:
    """The likely fastest first: float16 is for accelerators, on a CPU it is very slow."""
    words = {"bfloat16": "bfloat16", "half": "float16"}
    low = [(w, {"half": {"dtype": words[w]}}) for w in sorted(words) if w in allow]
    if device == "cpu":
        low.sort(key=lambda choice: choice[0] == "half")
    return [*low[:1], ("", {}), *low[1:]]


def _compilers(precision: Choice, allow: tuple[str, ...], mode: str) -> Iterator[Choice]:
    """The one that is likely the fastest first: OpenVINO in float32, and last in 16 bits."""
    openvino = [("openvino", {"compile": {"backend": "openvino"}})] if "openvino" in allow else []
    if not precision[0]:
        yield from openvino
    if "compile" in allow and mode == "eval":
        yield "frozen compile", {"compile": {"freezing": True}}
    if "compile" in allow:
        yield "compile", {"compile": {}}
    if precision[0]:
        yield from openvino


def _compiled_layouts(layouts: list[Choice], compiler: str, mode: str) -> list[Choice]:
    """A compiler chooses layouts of its own: so it is given the plain model, and the first format.

    OpenVINO only the plain one, as it lays all weights out anew. In training with its repairs, as eager
    gradients, which are known to be wrong, stop it else.
    """
    *formats, none = layouts
    if compiler == "openvino":
        return [none]
    plain = [each for each in formats if mode == "train" or "repair_layout" not in each[1]]
    return [none, *plain[:1]]


def _made(
    base: Mapping[str, Any],
    precision: Choice,
    layout: Choice,
    *,
    fuse: bool,
    compiler: Choice = ("", {}),
) -> Iterator[Candidate]:
    """The candidate of these choices; none where there is nothing in it, or it lacks what 16 bits need."""
    inputs = {}
    name = layout[0]
    if precision[0]:
        if layout[0] and "input_format" not in layout[1]:
            return  # an input has to be cast anyway
        inputs, name = _INPUT, name.replace(" + input", "")
    words = [precision[0], name, "fuse" if fuse else "", compiler[0]]
    if any(words):
        steps = (_FUSE if fuse else {}, base, precision[1], layout[1], compiler[1], inputs)
        merged = {name: options for each in steps for name, options in each.items()}
        yield Candidate(" + ".join(filter(None, words)), _resolved(merged))


def _acts(model: nn.Module, steps: Mapping[str, Any], name: str = "") -> bool:
    """Whether that step, or else the last one, finds something to do."""
    name = name or list(steps)[-1]
    if not all(each in STEPS for each in steps):
        return False
    try:
        plan = Pipeline.from_config(steps).plan(model, known_issues="ignore")
    except PrepareError:
        return False
    return any(action.step == name for action in plan.actions)


def _resolved(steps: Mapping[str, Any]) -> Steps:
    return Pipeline.from_config(steps).to_config()
