"""The faults of a verification that are faults of a call, planted in a running model for one shape only."""

from __future__ import annotations

import math

import torch

from prepare.core.model.module_tree import Snapshot
from prepare.errors import DriftError, GuardError
from prepare.pipeline import Pipeline
from verify_faults import BUFFERS, CHANGES, OTHERS, PARAMETERS, Net

FLAT = {"conv2d_memory_format": {}, "input_format": {}}
# What no comparison of a module with torch's own and the same weights can show, and why.
NOT_OF_A_CALL = {
    "frozen bias": "a flag of a weight, which torch's own has too",
    "frozen norm": "a flag of a weight, which torch's own has too",
    "momentum": "changes only what is kept for later calls",
    "no momentum": "changes only what is kept for later calls",
    "sign of one bias gradient": "a hook of a weight, which torch's own has too",
    "sign of a norm's gradient": "a hook of a weight, which torch's own has too",
    "a gradient a percent off": "a hook of a weight, which torch's own has too",
    "NaN in one gradient": "a hook of a weight, which torch's own has too",
    "no gradient": "a hook of a weight, which torch's own has too",
    "it raises": "the call raises by itself",
}
# These change nothing in eval mode without gradients.
ONLY_IN_TRAINING = {
    *("straight through", "a detached part", "half detached", "a detached input"),
    *("a wrong backward", "a doubled gradient", "all detached"),
}
ONLY_SERVED = {
    *("another bn.running_mean", "another bn.running_var"),
    # In training the call raises by itself, before the next check of drift.
    *("a bias in bfloat16", "a bias in float64"),
    # To freeze norms is a usual way to train.
    *("norm in another mode", "dropout in another mode"),
    # Drift, which has no shape in training; the other norm computes the same there.
    *("contiguous weight", "no running statistics"),
}


def wrong_kernel(path, change):
    """Return a fault that computes as if one tensor had other values; the tensor itself stays."""

    def fault(model):
        place, _, name = path.rpartition(".")
        owner = model.get_submodule(place)

        def forward(*args):
            table = owner._parameters if name in owner._parameters else owner._buffers
            right = table[name]
            wrong = change(right.detach().clone())
            table[name] = right + (wrong - right.detach()) if right.is_floating_point() else wrong
            try:
                return type(owner).forward(owner, *args)
            finally:
                table[name] = right

        owner.forward = forward

    return fault


PLANTED = {
    **{
        f"{name} of {path}": wrong_kernel(path, change)
        for path in PARAMETERS
        for name, change in CHANGES.items()
    },
    **{
        f"another {path}": wrong_kernel(path, change)
        for path, change in BUFFERS.items()
        if path != "bn.num_batches_tracked"
    },
    **{name: fault for name, fault in OTHERS.items() if name not in NOT_OF_A_CALL},
}
SERVED = sorted(set(PLANTED) - ONLY_IN_TRAINING)
TRAINED = sorted(set(PLANTED) - ONLY_SERVED)
RIGHT, WRONG = 16, 24


def prepared(training):
    torch.manual_seed(0)
    pipeline = Pipeline.from_config(FLAT)
    return pipeline, pipeline.apply(Net().train(training), known_issues="ignore")


def calls_until_caught_in_serving(name, calls=3):
    """Return the number of the call of the wrong shape that the guard refused; None if it refused none."""
    pipeline, model = prepared(training=False)
    with torch.no_grad(), pipeline.guard(model):
        for call in range(1, calls + 1):
            for size in (RIGHT, WRONG):
                before = Snapshot(model)
                if size == WRONG:
                    PLANTED[name](model)
                try:
                    model(pipeline.format(torch.randn(2, 3, size, size)))
                except (GuardError, DriftError):
                    assert size == WRONG
                    return call
                before.restore()
    return None


def steps_until_caught_in_training(name, every=40, first=20):
    """Return the number of the step after the fault in which it was found; None after `every` steps."""
    pipeline, model = prepared(training=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pipeline.guard(model, every=every, share=math.inf) as guard:
        for step in range(1, first + 2 * every + 1):
            size = WRONG if step % 2 else RIGHT
            before = Snapshot(model)
            if step > first and size == WRONG:
                PLANTED[name](model)
            try:
                loss = sum(x.square().mean() for x in leaves(model(batch(pipeline, size))))
                if loss.requires_grad:
                    loss.backward()
                guard()
            except (GuardError, DriftError):
                assert step > first
                assert size == WRONG
                return (step - first + 1) // 2  # of this shape
            before.restore()
            if all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):
                optimizer.step()  # else it is left out, as a GradScaler does
            optimizer.zero_grad()
    return None


def batch(pipeline, size):
    return pipeline.format(torch.randn(2, 3, size, size))


def leaves(outputs):
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return [x for v in values for x in (v if isinstance(v, list) else [v])]
