"""A batch and a short cut that tunes."""

import torch

from prepare.stages.tune import tune

BATCH = torch.ones(2, 3, 12, 12)


def found_with(timed, means, model, batch=BATCH, **how):
    timed.update(means)
    return tune(model, batch, **({"cache": False, "budget": 5.0} | how))
