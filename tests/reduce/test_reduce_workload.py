"""The reduction of a model that is wrong at one of several sizes."""

from dataclasses import replace

import torch

from made_works import work
from prepare import Workload
from prepare.core.forward.example_input import Example
from prepare.stages.reduce.stage import ReduceStage
from prepare.stages.verify.records import unknown


def test_it_has_the_size_that_fails(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "prepare.stages.reduce.reduce", lambda _, example, **__: seen.append(example)
    )
    workload = Workload([Example((torch.zeros(n, 3, 8, 8),)) for n in (1, 16)], weights=[9, 1])
    failed = replace(unknown("wrong", level="short", mode="eval"), size=workload.sizes[1])
    for verification in (failed, replace(failed, size=None)):
        given = {"example": workload.head, "workload": workload, "found": {"verify": verification}}
        ReduceStage().run(work(**given))
    assert [len(example.args[0]) for example in seen] == [16, 1]
