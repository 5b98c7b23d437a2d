"""Write the breaks of a flow as SARIF 2.1.0, which code hosts show at the lines of a pull request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from prepare.core.utils.json_records import write_json
from prepare.core.utils.text import plural, size
from prepare.stages.flow.causes import event_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prepare.stages.flow.records import Event, Flow

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def write_sarif(flow: Flow, path: Path) -> None:
    """Write `sarif_log(flow)` as JSON. Raises FileError."""
    write_json(path, sarif_log(flow))


def sarif_log(flow: Flow) -> dict[str, Any]:
    """Return the log: a rule for each cause of a break, and a result for each cause and line of code.

    The line is that of the call; where a module of torch calls, or code outside of the current folder, it
    is the first line of the innermost forward around it that is inside. Paths are relative to that folder.
    A flow that `cannot predict` is a run that did not succeed, with the reason.
    """
    found: dict[tuple[str, str], list[Event]] = {}
    places = {module.name: module.source for module in flow.modules}
    for event in flow.events:
        if event.kind == "break":
            place = next(filter(_is_inside, _places(event, places)), "")
            found.setdefault((f"layout/{event.cause}", place), []).append(event)
    rules = list(dict.fromkeys(rule for rule, _ in found))
    driver = {
        "name": "prepare",
        "rules": [{"id": rule, "shortDescription": {"text": _about(rule)}} for rule in rules],
    }
    ended: dict[str, Any] = {"executionSuccessful": flow.status == "ok"}
    if flow.status != "ok":
        reason = f"{flow.status}: {flow.reason}"
        ended["toolExecutionNotifications"] = [{"level": "error", "message": {"text": reason}}]
    results = [
        _result(rule, rules.index(rule), place, events) for (rule, place), events in found.items()
    ]
    run = {"tool": {"driver": driver}, "invocations": [ended], "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _about(rule: str) -> str:
    return f"an activation loses its memory format: {rule.partition('/')[2]}"


def _places(event: Event, places: dict[str, str]) -> Iterator[str]:
    """Yield where an event is, the nearest first: its call, then the forwards around it."""
    yield event.source
    parts = event.module.split(".") if event.module else []
    for count in range(len(parts), -1, -1):
        yield places.get(".".join(parts[:count]), "")


def _is_inside(place: str) -> bool:
    # A path of an installed package is relative to its folder, and is not here.
    path = Path(place.rpartition(":")[0])
    return not path.is_absolute() and path.is_file()


def _result(rule: str, index: int, place: str, events: list[Event]) -> dict[str, Any]:
    modules = list(dict.fromkeys(event.module or event.type for event in events))
    more = f" and {len(modules) - 1:,} more" if len(modules) > 1 else ""
    names = ", ".join(dict.fromkeys(map(event_name, events)))
    count, nbytes = sum(event.count for event in events), sum(event.bytes for event in events)
    phases = " and ".join(dict.fromkeys(event.phase for event in events))
    text = (
        f"{names} loses the layout in {modules[0]}{more}: {plural(count, 'time')} in {phases}, "
        f"{size(nbytes)} of outputs"
    )
    location: dict[str, Any] = {
        "logicalLocations": [{"fullyQualifiedName": name, "kind": "module"} for name in modules]
    }
    if place:
        path, _, line = place.rpartition(":")
        location["physicalLocation"] = {
            "artifactLocation": {"uri": quote(path)},
            "region": {"startLine": int(line)},
        }
    return {
        "ruleId": rule,
        "ruleIndex": index,
        "level": "warning",
        "message": {"text": text},
        "locations": [location],
    }
