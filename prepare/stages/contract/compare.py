"""Compare a contract with the model of today: what is broken, what is better, what cannot be decided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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


def compare(contract: Contract, today: Contract) -> ContractCheck:
    """Return all changes, the worst first; those that differ only in their place are one, with a count."""
    parts = (_recipe, _structure, _weights, _places, _layouts, _optimizer, _verification, _time,
             _versions)  # fmt: skip
    changes: dict[tuple[str, str, str, str], ContractChange] = {}
    for part in parts:
        for change in part(contract, today):
            # A place is shown with its own line of code.
            key = (change.kind, change.what, change.text, change.source)
            known = changes.get(key)
            changes[key] = replace(known, count=known.count + 1) if known else change
    for name in {**contract.sizes, **today.sizes}:
        for change in _at_size(name, contract.sizes.get(name), today.sizes.get(name)):
            changes[change.kind, change.what, change.text, change.source + change.where] = change
    ranked = sorted(changes.values(), key=lambda change: KINDS.index(change.kind))
    return ContractCheck(changes=tuple(ranked), today=today)


def _at_size(
    name: str, before: Contract | None, after: Contract | None
) -> Iterator[ContractChange]:
    """Yield the changes at a size of a workload."""
    if before is None or after is None:
        yield _broken("sizes", name, "is gone" if before else "is new")
        return
    for change in compare(before, after).changes:
        yield replace(change, where=f"{change.where} at {name}".strip())


def _recipe(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    before, after = contract.steps or {}, today.steps or {}
    for name in {**before, **after}:
        if name not in before or name not in after:
            yield _broken("recipe", name, "is gone" if name in before else "is new")
        elif before[name] != after[name]:
            yield _broken("recipe", name, "its options changed")


def _structure(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    if contract.structure == today.structure:
        return
    for name in {**contract.modules, **today.modules}:
        before, after = contract.modules.get(name), today.modules.get(name)
        if before != after:
            text = "is new" if before is None else "is gone" if after is None else ""
            yield _broken("structure", name or "the model", text or f"{before} is now {after}")
    for name in contract.weights.keys() ^ today.weights.keys():
        yield _broken("structure", name, "is new" if name in today.weights else "is gone")


def _weights(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    for name in sorted(contract.weights.keys() & today.weights.keys()):
        before, after = contract.weights[name].split(), today.weights[name].split()
        if before == after:
            continue
        if before[0] != after[0]:
            yield _broken("structure", name, f"shape {before[0]} is now {after[0]}")
        for what, old, new in zip(("dtype", "device"), before[3:], after[3:], strict=True):
            if old != new:
                yield _broken("weights", name, f"{what} {old} is now {new}")
        if before[0] == after[0] and before[1] != after[1]:
            kind = BETTER if before[2] == "contiguous" and after[2] in _KEPT else BROKEN
            text = f"{before[2]} is now {after[2]}"
            if before[2] == after[2]:
                text = f"strides {before[1]} are now {after[1]}"
            yield ContractChange(kind, "weights", name, text)


def _places(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    before = {place.key: place for place in contract.places}
    after = {place.key: place for place in today.places}
    for key, place in {**before, **after}.items():
        was, now = (places[key].count if key in places else 0 for places in (before, after))
        text = f"{place.kind} in {place.phase}: {place.cause}"
        text += f", {was} times before, {now} now" if was and now else ""
        where = place.module or contract.model
        if now > was:
            yield _broken("flow", where, f"new {text}", place.source)
        elif now < was:
            yield ContractChange(BETTER, "flow", where, f"no longer a {text}")


def _layouts(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    for name in contract.layouts.keys() & today.layouts.keys():
        before, after = contract.layouts[name], today.layouts[name]
        if (before in _KEPT) != (after in _KEPT):
            kind = BROKEN if before in _KEPT else BETTER
            text = f"gave {before}, gives {after} now"
            yield ContractChange(kind, "convolutions", name, text)


def _optimizer(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    if contract.optimizer and not today.optimizer:
        yield ContractChange(NOTE, "optimizer", "", "not checked: none was given")
    for name in contract.optimizer.keys() & today.optimizer.keys():
        before, after = contract.optimizer[name], today.optimizer[name]
        if before != after:
            yield _broken("optimizer", name, f"{before} is now {after}")


def _verification(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    before, after = contract.verified, today.verified
    if before and after and before != after:
        if after == "fail":
            yield _broken("verification", "", f"{before} before, fails now")
        elif after == "cannot tell":
            yield ContractChange(TOO_NOISY, "verification", "", "unclear now")
        else:
            yield ContractChange(BETTER, "verification", "", f"{before} before, passes now")
    elif before and not after:
        yield ContractChange(NOTE, "verification", "", "not repeated")
    recorded = {tolerance.what: tolerance for tolerance in contract.tolerances}
    for now in today.tolerances if "fail" not in (before, after) else ():
        old = recorded.get(now.what)
        # The tolerance of this run: that of another batch or machine may be many times smaller.
        if old is not None and old.error <= old.allowed and now.error > now.allowed:
            text = f"error {now.error:.2g} and {now.allowed:.2g} allowed, recorded with {old.error:.2g}"
            yield _broken("verification", now.what, text)


def _time(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    before, after = contract.time, today.time
    if before is None:
        return
    what = "time ratio"
    if after is None:
        yield ContractChange(NOTE, what, "", "not measured")
        return
    text = f"{pace_text(before.ratio, (before.low, before.high))} before, "
    text += f"{pace_text(after.ratio, (after.low, after.high))} now"
    if before.machine != after.machine:
        yield ContractChange(NOTE, what, "", f"{text}, on another machine")
    elif disturbed := after.disturbed or before.disturbed:
        yield ContractChange(TOO_NOISY, what, "", f"{text}; {disturbed}")
    elif after.low > before.high * _TIME:
        yield _broken(what, "", text)
    elif after.high * _TIME < before.low:
        yield ContractChange(BETTER, what, "", text)
    elif not after.low <= before.ratio <= after.high:
        yield ContractChange(TOO_NOISY, what, "", text)


def _versions(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    for name in sorted(contract.seen.keys() | today.seen.keys()):
        before, after = contract.seen.get(name, "none"), today.seen.get(name, "none")
        if before != after:
            yield ContractChange(NOTE, "versions", name, f"{before} is now {after}")


def _broken(what: str, where: str, text: str, source: str = "") -> ContractChange:
    return ContractChange(BROKEN, what, where, text, source)
