"""The error of each module in 16 bits."""

import copy
import math

import torch
from torch import nn

from keep_checks import LOUD, Attempts, Energy, Net, Offset, seeded
from prepare.pipeline import Pipeline
from prepare.tune.module_errors import ModuleError, measure_modules, worth_keeping


def errors_of(model, batch, dtype, mode="eval"):
    low = Pipeline.from_config({"half": {"dtype": dtype}}).apply(copy.deepcopy(model))
    return measure_modules(copy.deepcopy(model), low, batch, dtype=getattr(torch, dtype), mode=mode)


def test_a_module_that_overflows_has_an_infinite_error():
    errors = errors_of(seeded(Net, Energy()), LOUD, "float16")
    assert errors.keys() == {"first", "middle", "last"}
    assert errors["middle"].low == math.inf
    assert errors["middle"].kept < 1e-3
    assert worth_keeping(errors)[0] == "middle"


def test_a_module_that_loses_digits_has_a_large_error():
    class Shifts(Net):
        def forward(self, x):
            return self.last(self.middle(self.first(x), by={"large": 1000.0}))

    errors = errors_of(seeded(Shifts, Offset()), LOUD / 1000, "bfloat16")
    assert errors["middle"].low > 0.5
    assert errors["middle"].kept < 0.01
    assert worth_keeping(errors)[0] == "middle"


def test_a_container_is_kept_if_results_inside_do_not_fit():
    class Scale(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def forward(self, x):
            return x * self.by

    model = seeded(Net, nn.Sequential(Scale(1e4), Scale(1e-4)))
    errors = errors_of(model, LOUD, "float16")
    assert errors["middle.0"].kept == errors["middle.0"].low == math.inf
    assert worth_keeping(errors)[0] == "middle"


def test_a_container_is_kept_last_for_the_error_of_one_module_in_it():
    errors = {
        "block": ModuleError(0.5, 0.001),
        "block.bad": ModuleError(0.4, 0.001),
        "block.good": ModuleError(0.003, 0.002),
        "other": ModuleError(0.9, 0.85),
        "many": ModuleError(0.02, 0.002),
        "many.a": ModuleError(0.009, 0.002),
        "many.b": ModuleError(0.008, 0.002),
    }
    order = ["block.bad", "many", "many.a", "many.b", "block.good", "block"]
    assert worth_keeping(errors) == order


def test_modules_inside_a_kept_one_are_not_named():
    attempts = Attempts(["a"])
    search = attempts.search(["a.b", "a.c", "a"])
    assert search.modules == ("a",)
    assert attempts.tried == ["a.b", "a.ba.c", "a"]


def test_dropout_is_not_an_error():
    model = seeded(Net, nn.Dropout(0.5)).train()
    assert errors_of(model, LOUD / 1000, "bfloat16", "train")["middle"].low < 0.01
