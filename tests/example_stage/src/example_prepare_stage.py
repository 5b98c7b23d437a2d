"""A stage of another package: how deep the module tree of a model is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from prepare.core.document import Answer, Bar, Bars, Document, Facts, ReportContext
from prepare.stages.stage import Column, Stage, StageContext, Task, Verdict, key


@dataclass(frozen=True)
class Depth:
    """The depth of a module tree, and the most that is allowed."""

    depth: int
    most: int

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Depth:
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


class Depths(Stage):
    """The depth of the module tree."""

    noun: ClassVar[str] = "the measurement of the depth"
    order: ClassVar[int] = 90
    tasks: ClassVar[Mapping[str, Task]] = {"depths": Task("measure the depth of the module tree")}
    columns: ClassVar[tuple[Column, ...]] = (
        Column("depth", lambda figures: str(figures.get("tree_depth", "")), number=True),
    )

    most: int = key(9, "the largest depth that is right", "4")

    @classmethod
    def records(cls) -> Mapping[str, Any]:
        return {"depths.json": Depth}

    def run(self, work: StageContext) -> Mapping[str, Any]:
        with work.progress("measuring the depth"):
            depth = max(name.count(".") + bool(name) for name, _ in work.model.named_modules())
        return {"depths": Depth(depth, self.most)}

    @classmethod
    def verdict(cls, found: Mapping[str, Any]) -> Verdict | None:
        depth = found.get("depths")
        if depth is None or depth.depth <= depth.most:
            return None
        error = f"the depth is {depth.depth}, more than {depth.most}"
        return Verdict(status="verification_failed", reason="depths", error=error)

    @classmethod
    def figures(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        return {"tree_depth": found["depths"].depth} if "depths" in found else {}

    @classmethod
    def document(cls, shown: ReportContext) -> Document | None:
        depth = shown.found.get("depths")
        if depth is None:
            return None
        text = f"the module tree is {depth.depth} deep"
        bars = (Bar(label="depth", value=depth.depth, text=str(depth.depth)),)
        return Document(
            name="depths",
            title="Deep?",
            line=text,
            answers=(Answer(question="Deep?", kind="plain", answer=f"{depth.depth} deep"),),
            parts=lambda: (
                Facts(rows=(("Depth", str(depth.depth)), ("At most", str(depth.most)))),
                Bars(title="Depth of the tree", rows=bars),
            ),
        )
