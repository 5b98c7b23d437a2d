"""Compare a contract with the model of today: what is broken, what is better, what cannot be decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from prepare.core.utils.numbers import pace_text
from prepare.stages.contract.records import (
    BETTER,
    BROKEN,
    KINDS,
    NOTE,
    TOO_NOISY,
    Contract,
    ContractChange,
    ContractCheck,
)

# A time ratio breaks the contract if its whole interval is above the recorded one by this factor.
_TIME = 1.05
_KEPT = ("channels_last", "channels_last_3d", "ambiguous")
_Changes = Iterator[ContractChange]


def compare(contract: Contract, today: Contract) -> ContractCheck:
    """Return all changes, the worst first; those that differ only in their place are one, with a count."""
    changes: dict[tuple[str, ...], ContractChange] = {}
    for change in (each for part in _PARTS for each in part(contract, today)):
        # A place is shown with its own line of code.
        key = (change.kind, change.what, change.text, change.source)
        known = changes.get(key)
        changes[key] = replace(known, count=known.count + 1) if known else change
    listed = [*changes.values(), *_at_sizes(contract, today)]
    return ContractCheck(
        changes=tuple(sorted(listed, key=lambda change: KINDS.index(change.kind))), today=today
    )


def _at_sizes(contract: Contract, today: Contract) -> _Changes:
    """Yield the changes at each size of a workload."""
    for name in {**contract.sizes, **today.sizes}:
        before, after = contract.sizes.get(name), today.sizes.get(name)
        if before is None or after is None:
            yield _broken("sizes", name, "is gone" if before else "is new")
            continue
        for change in compare(before, after).changes:
            yield replace(change, where=f"{change.where} at {name}".strip())


def _recipe(contract: Contract, today: Contract) -> _Changes:
    for name, old, new in _differing(contract.steps or {}, today.steps or {}):
        yield _broken("recipe", name, _lost(old, new) or "its options changed")


def _structure(contract: Contract, today: Contract) -> _Changes:
    for name, old, new in _differing(contract.structure, today.structure):
        yield _broken("structure", name or "the model", _lost(old, new) or f"{old} is now {new}")


def _weights(contract: Contract, today: Contract) -> _Changes:
    for name, before, after in _differing(contract.weights, today.weights):
        if not before or not after:
            continue  # the structure differs
        (shape, *old), (now_shape, *new) = before.split(), after.split()
        for what, was, now in zip(("dtype", "device"), old[2:], new[2:], strict=True):
            if was != now:
                yield _broken("weights", name, f"{what} {was} is now {now}")
        if shape == now_shape and old[0] != new[0]:
            kind = BETTER if old[1] == "contiguous" and new[1] in _KEPT else BROKEN
            text = f"{old[1]} is now {new[1]}"
            text = f"strides {old[0]} are now {new[0]}" if old[1] == new[1] else text
            yield ContractChange(kind, "weights", name, text)


def _flow(contract: Contract, today: Contract) -> _Changes:
    for where in {**contract.flow, **today.flow}:
        before, after = contract.flow.get(where, {}), today.flow.get(where, {})
        for what, old, new in _differing(before, after):
            text = f"{what}, {old} times before, {new} now" if old and new else what
            if (new or 0) < (old or 0):
                yield ContractChange(BETTER, "flow", where or contract.model, f"no longer a {text}")
            else:
                source = today.sources.get(f"{where}: {what}", "")
                yield _broken("flow", where or contract.model, f"new {text}", source)


def _layouts(contract: Contract, today: Contract) -> _Changes:
    for name, old, new in _differing(contract.layouts, today.layouts):
        if old and new and (old in _KEPT) != (new in _KEPT):
            kind = BROKEN if old in _KEPT else BETTER
            yield ContractChange(kind, "convolutions", name, f"gave {old}, gives {new} now")


def _optimizer(contract: Contract, today: Contract) -> _Changes:
    if contract.optimizer and not today.optimizer:
        yield ContractChange(NOTE, "optimizer", "", "not checked: none was given")
    for name, old, new in _differing(contract.optimizer, today.optimizer):
        if old and new:
            yield _broken("optimizer", name, f"{old} is now {new}")


def _verification(contract: Contract, today: Contract) -> _Changes:
    before, after = contract.verified, today.verified
    if before and before != after:
        kind, text = {
            "fail": (BROKEN, f"{before} before, fails now"),
            "cannot tell": (TOO_NOISY, "unclear now"),
            "pass": (BETTER, f"{before} before, passes now"),
            "": (NOTE, "not repeated"),
        }[after]
        yield ContractChange(kind, "verification", "", text)
    for what, old, new in _differing(contract.errors, today.errors):
        # The limit is that of this run: that of another batch or machine may be many times smaller.
        if "fail" not in (before, after) and old is not None and old <= 1 < (new or 0):
            text = f"the error is {new:.2g} of its limit, recorded with {old:.2g}"
            yield _broken("verification", what, text)


def _time(contract: Contract, today: Contract) -> _Changes:
    before, after, what = contract.time, today.time, "time ratio"
    if before is None:
        return
    if after is None:
        kind = TOO_NOISY if today.untimed else NOTE
        yield ContractChange(kind, what, "", today.untimed or "not measured")
        return
    text = f"{pace_text(before.ratio, (before.low, before.high))} before, "
    text += f"{pace_text(after.ratio, (after.low, after.high))} now"
    if before.machine != after.machine:
        yield ContractChange(NOTE, what, "", f"{text}, on another machine")
    elif after.low > before.high * _TIME:
        yield _broken(what, "", text)
    elif after.high * _TIME < before.low:
        yield ContractChange(BETTER, what, "", text)
    elif not after.low <= before.ratio <= after.high:
        yield ContractChange(TOO_NOISY, what, "", text)


def _versions(contract: Contract, today: Contract) -> _Changes:
    for name, old, new in sorted(_differing(contract.seen, today.seen)):
        yield ContractChange(NOTE, "versions", name, f"{old or 'none'} is now {new or 'none'}")


_PARTS = (
    *(_recipe, _structure, _weights, _flow, _layouts),
    *(_optimizer, _verification, _time, _versions),
)


def _differing(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each name with its two values, None for one that is missing, where they differ."""
    for name in {**before, **after}:
        if name not in before or name not in after or before[name] != after[name]:
            yield name, before.get(name), after.get(name)


def _lost(old: Any, new: Any) -> str:
    return "is new" if old is None else "is gone" if new is None else ""


def _broken(what: str, where: str, text: str, source: str = "") -> ContractChange:
    return ContractChange(BROKEN, what, where, text, source)
