"""Expect of a GPU that is not here what others measured there, on networks whose flow is like this one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.core.utils import plain_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prepare.stages.flow.records import Flow

FILE = Path(__file__).with_suffix(".yaml")
# Networks with fewer convolutions are not among those that were measured.
FEWEST = 10
# From this share of all multiplications on, matrix products and attention decide, and not convolutions.
PRODUCTS = 0.2
# In training, that of grouped convolutions from which on they decide.
GROUPED = 0.2
LIKE = {
    "no breaks": "convolutional networks without breaks",
    "breaks": "convolutional networks with breaks",
    "products": "networks of matrix products and attention",
    "grouped": "networks of grouped convolutions",
}


def likeness(breaks: int, work: Mapping[str, int], *, training: bool = False) -> str:
    """Return the kind of network, a key of LIKE, by its breaks and its multiplications by kind."""
    total = sum(work.values())
    if total and work.get("product", 0) >= PRODUCTS * total:
        return "products"
    if training and total and work.get("grouped", 0) >= GROUPED * total:
        return "grouped"
    return "breaks" if breaks else "no breaks"


def expectations(flow: Flow, *, training: bool = False) -> Iterator[str]:
    """Yield sentences on what channels-last did on GPUs for networks like this one, as others measured it.

    There are none where the flow is not for a CUDA device, or does not ask for channels-last.
    """
    if not flow.device.startswith("cuda") or flow.status != "ok" or not flow.work:
        return
    formats = {*flow.wanted.values()}
    if "channels_last_3d" in formats and any(
        row.output for row in flow.convolutions if "3d" in row.type
    ):
        yield "measured by others: no data of 3-d networks in a GPU's channels_last_3d but single cases"
        return
    if "channels_last" not in formats or flow.summary["convolutions"] < FEWEST:
        return
    kind, mode = (
        likeness(flow.summary["breaks"], flow.work, training=training),
        "training" if training else "inference",
    )
    rows = [row for row in _table()["pairs"] if row["mode"] == mode]
    latest = {row["card"]: row for row in rows}  # the file is in the order of versions
    cards = [_sentence(row, row["kinds"].get(kind)) for row in latest.values()]
    like = f"{LIKE[kind]} (timm, 2-d, AMP, {mode})"
    yield f"measured by others on {like}: {'; '.join(cards)}; other cards: no data"


def _sentence(row: Mapping[str, Any], kind: Mapping[str, Any] | None) -> str:
    if kind is None:
        return f"{row['card']} too few networks"
    low, median, high = (f"{kind[key]:.2f}" for key in ("low", "median", "high"))
    networks = f"{kind['networks']} networks, torch {row['torch']}"
    return f"{row['card']} {median}x as fast (half between {low} and {high}; {networks})"


@cache
def _table() -> dict[str, Any]:
    return plain_yaml.read(FILE.read_bytes(), FILE.name, remedy="").value  # type: ignore[return-value]
