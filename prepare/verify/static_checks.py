"""What needs no forward: the values of both models, what a cast took from them, flags and layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from prepare.core.model.tensors import is_plain, name_of, named_modules, named_tensors
from prepare.steps.repairs import find_repair, repair_names
from prepare.verify.records import Check, Lost

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline

Pairs = dict[str, tuple[Tensor, Tensor]]


def pairs_of(reference: nn.Module, prepared: nn.Module) -> Pairs:
    """Each tensor that both models hold under one name: the reference's, and the prepared one's."""
    there = {place.path: place.tensor for place in named_tensors(reference)}
    here = {place.path: place.tensor for place in named_tensors(prepared)}
    return {path: (there[path], tensor) for path, tensor in here.items() if path in there}


def rewritten(
    reference: nn.Module, prepared: nn.Module, pipeline: Pipeline | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules that a structure step gives other tensors, and those whose mode it may have set.

    A repair of ours does neither.
    """
    if pipeline is None:
        return (), ()
    repairs = [find_repair(name) for name in repair_names()]
    here = dict(named_modules(prepared))
    actions = pipeline.plan(reference, known_issues="ignore").actions
    asked = [(n, a.step) for a in actions if a.phase == "structure" for n in a.modules]
    free = tuple(n for n, step in asked if not pipeline.steps[step].keeps_tensors)
    return free, tuple(
        n for n, _ in asked if n not in here or not any(r.is_repaired(here[n]) for r in repairs)
    )


def check_values(
    reference: nn.Module, prepared: nn.Module, pairs: Pairs, free: tuple[str, ...]
) -> Check:
    """Whether every tensor holds what a plain cast of the reference's gives, bit for bit."""
    total = {place.path for model in (reference, prepared) for place in named_tensors(model)}
    wrong = [
        path for path in sorted(total) if not _is_under(path, free) and not _same(pairs.get(path))
    ]
    if not wrong:
        return Check(what="values", status="pass", compared=len(pairs))
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    said = "does not hold" if wrong[0] in pairs else "is in one model only, so it does not hold"
    return Check(
        what="values", status="fail", worst=wrong[0], compared=len(total),
        note=f"{wrong[0]}{more} {said} the reference's values, cast to its dtype",
    )  # fmt: skip


def lost_in(pairs: Pairs) -> tuple[Lost, ...]:
    """What the casts took, from every tensor they took something from; the worst first."""
    found = [lost for path, pair in pairs.items() if (lost := _lost(path, *pair))]
    return tuple(sorted(found, key=lambda x: (-x.overflowed, -x.rounded, -x.flushed, x.tensor)))


def check_casts(lost: tuple[Lost, ...]) -> Check:
    """Whether a finite number has become infinite; the rest is for the record."""
    over = [one for one in lost if one.overflowed]
    if not over:
        return Check(what="casts", status="pass", compared=len(lost))
    note = f"{over[0].overflowed} of {over[0].elements} numbers of {over[0].tensor} overflow {over[0].after}"
    return Check(what="casts", status="fail", worst=over[0].tensor, compared=len(lost), note=note)


def check_layout(prepared: nn.Module, pipeline: Pipeline) -> Check:
    """Whether everything lies and is typed as the pipeline wants it."""
    drift = pipeline.check(prepared)
    if not drift:
        return Check(what="layout", status="pass")
    more = f" (and {len(drift) - 1} more)" if len(drift) > 1 else ""
    return Check(what="layout", status="fail", worst=drift[0].where, note=f"{drift[0]}{more}")


def check_flags(reference: nn.Module, prepared: nn.Module, free: tuple[str, ...]) -> Check:
    """Whether the same modules are in training mode; only where both models themselves agree."""
    if reference.training != prepared.training:
        return Check(
            what="flags", status="skipped", note="one model is in training mode, the other is not"
        )
    there = {name: module.training for name, module in named_modules(reference)}
    for name, module in named_modules(prepared):
        if there.get(name, module.training) != module.training and not _is_under(name, free):
            now, was = _mode(module.training), _mode(there[name])
            note = f"{name} is in {now} mode, in the reference in {was} mode"
            return Check(what="flags", status="fail", worst=name, compared=len(there), note=note)
    return Check(what="flags", status="pass", compared=len(there))


def _mode(training: bool) -> str:  # noqa: FBT001
    return "train" if training else "eval"


def _is_under(path: str, free: tuple[str, ...]) -> bool:
    return any(not name or path == name or path.startswith(name + ".") for name in free)


def _same(pair: tuple[Tensor, Tensor] | None) -> bool:
    if pair is None:
        return False
    reference, ours = (tensor.detach() for tensor in pair)
    if not (is_plain(pair[0]) and is_plain(pair[1])):
        return True  # what such a tensor means is its class's affair; outputs will tell
    if reference.shape != ours.shape or reference.is_complex() != ours.is_complex():
        return False
    cast = reference.to(ours.device, ours.dtype)
    nothing = (cast != cast) & (ours != ours)  # noqa: PLR0124
    return bool(((cast == ours) | nothing).all())


def _lost(path: str, before: Tensor, after: Tensor) -> Lost | None:
    plain = is_plain(before) and is_plain(after) and before.shape == after.shape
    if not plain or before.dtype == after.dtype or not before.is_floating_point():
        return None
    counts = dict(_counts(before.detach(), after.detach().to(before.device)))
    if not any(counts.values()):
        return None
    kinds = {"before": name_of(before.dtype), "after": name_of(after.dtype)}
    return Lost(tensor=path, elements=before.numel(), **kinds, **counts)


def _counts(before: Tensor, after: Tensor) -> Iterator[tuple[str, int]]:
    yield "overflowed", int((before.isfinite() & ~after.isfinite()).sum())
    yield "flushed", int(((before != 0) & (after == 0)).sum())
    whole = before.numel() > 1 and bool((before == before.round()).all())
    yield "rounded", int((before != after.to(before.dtype)).sum()) if whole else 0
