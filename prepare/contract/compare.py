"""Compare a contract with the model of today: what is broken, what is better, what cannot be decided."""

from __future__ import annotations

from collections.abc import Iterator

from prepare.contract.records import (
    BETTER,
    BROKEN,
    KINDS,
    NOTE,
    TOO_NOISY,
    Contract,
    ContractChange,
    ContractCheck,
)

# An error breaks the contract from this many times the recorded tolerance on: between two machines or
# versions, rounding differs by less than that.
_TOLERANCE = 3.0
# A time ratio breaks the contract if its whole interval is above the recorded one by this factor.
_TIME = 1.05
_KEPT = ("channels_last", "channels_last_3d", "ambiguous")


def compare(contract: Contract, today: Contract) -> ContractCheck:
    """Return all changes, the worst first."""
    changes = [
        *_recipe(contract, today),
        *_structure(contract, today),
        *_weights(contract, today),
        *_places(contract, today),
        *_layouts(contract, today),
        *_optimizer(contract, today),
        *_verification(contract, today),
        *_time(contract, today),
        *_versions(contract, today),
    ]
    merged = _merged(changes)
    return ContractCheck(
        changes=tuple(sorted(merged, key=lambda c: KINDS.index(c.kind))), today=today
    )


def _merged(changes: list[ContractChange]) -> Iterator[ContractChange]:
    """Merge the changes that differ only in their place into one with a count."""
    groups: dict[tuple[str, str, str, str], list[ContractChange]] = {}
    for change in changes:
        # A place is shown with its own line of code.
        key = (change.kind, change.what, change.text, change.source)
        groups.setdefault(key, []).append(change)
    for (kind, what, text, source), group in groups.items():
        yield ContractChange(
            kind=kind, what=what, where=group[0].where, text=text, source=source, count=len(group)
        )


def _recipe(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    before, after = contract.steps or {}, today.steps or {}
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            text = "its options changed" if name in before and name in after else ""
            yield _broken("recipe", name, text or ("is gone" if name in before else "is new"))


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
            better = before[2] == "contiguous" and after[2] in _KEPT
            text = f"{before[2]} is now {after[2]}"
            if before[2] == after[2]:
                text = f"strides {before[1]} are now {after[1]}"
            yield ContractChange(
                kind=BETTER if better else BROKEN, what="weights", where=name, text=text
            )


def _places(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    before = {place.key: place for place in contract.places}
    after = {place.key: place for place in today.places}
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        counts = (old.count if old else 0), (new.count if new else 0)
        if counts[0] == counts[1]:
            continue
        place = new or old
        assert place is not None
        text = f"{place.kind} in {place.phase}: {place.cause}"
        if 0 not in counts:
            text += f", {counts[0]} times before, {counts[1]} now"
        where = place.module or contract.model
        if counts[1] > counts[0]:
            yield _broken("flow", where, f"new {text}", place.source)
        else:
            yield ContractChange(kind=BETTER, what="flow", where=where, text=f"no longer a {text}")


def _layouts(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    for name in contract.layouts.keys() & today.layouts.keys():
        before, after = contract.layouts[name], today.layouts[name]
        if (before in _KEPT) != (after in _KEPT):
            kind = BROKEN if before in _KEPT else BETTER
            text = f"gave {before}, gives {after} now"
            yield ContractChange(kind=kind, what="convolutions", where=name, text=text)


def _optimizer(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    if contract.optimizer and not today.optimizer:
        yield ContractChange(
            kind=NOTE, what="optimizer", where="", text="not checked: none was given"
        )
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
            yield ContractChange(
                kind=TOO_NOISY, what="verification", where="", text="cannot tell now"
            )
        else:
            yield ContractChange(
                kind=BETTER, what="verification", where="", text=f"{before} before, passes now"
            )
    elif before and not after:
        yield ContractChange(kind=NOTE, what="verification", where="", text="not repeated")
    recorded = {tolerance.what: tolerance for tolerance in contract.tolerances}
    for now in today.tolerances if "fail" not in (before, after) else ():
        old = recorded.get(now.what)
        if old is not None and now.error > _TOLERANCE * old.allowed:
            text = f"error {now.error:.2g}, recorded with {old.error:.2g} and {old.allowed:.2g} allowed"
            yield _broken("verification", now.what, text)


def _time(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    before, after = contract.time, today.time
    if before is None:
        return
    what = "time ratio"
    if after is None:
        yield ContractChange(kind=NOTE, what=what, where="", text="not measured")
        return
    text = f"{before.ratio:.2f} ({before.low:.2f} to {before.high:.2f}) before, "
    text += f"{after.ratio:.2f} ({after.low:.2f} to {after.high:.2f}) now"
    if before.machine != after.machine:
        yield ContractChange(kind=NOTE, what=what, where="", text=f"{text}, on another machine")
    elif before.disturbed or after.disturbed:
        text = f"{text}; {after.disturbed or before.disturbed}"
        yield ContractChange(kind=TOO_NOISY, what=what, where="", text=text)
    elif after.low > before.high * _TIME:
        yield _broken(what, "", text)
    elif after.high * _TIME < before.low:
        yield ContractChange(kind=BETTER, what=what, where="", text=text)
    elif not (after.low <= before.ratio <= after.high):
        yield ContractChange(kind=TOO_NOISY, what=what, where="", text=text)


def _versions(contract: Contract, today: Contract) -> Iterator[ContractChange]:
    for name in sorted(contract.seen.keys() | today.seen.keys()):
        before, after = contract.seen.get(name, "none"), today.seen.get(name, "none")
        if before != after:
            yield ContractChange(
                kind=NOTE, what="versions", where=name, text=f"{before} is now {after}"
            )


def _broken(what: str, where: str, text: str, source: str = "") -> ContractChange:
    return ContractChange(kind=BROKEN, what=what, where=where, text=text, source=source)
