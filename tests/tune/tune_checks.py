"""A batch and a short cut that tunes; networks with modules that need float32."""

import torch
from torch import nn

from prepare.stages.tune import tune
from prepare.stages.tune.compare_candidates import CheckResult
from prepare.stages.tune.keep_modules import search_fewest

BATCH = torch.ones(2, 3, 12, 12)


def found_with(timed, means, model, batch=BATCH, **how):
    timed.update(means)
    return tune(model, batch, **({"cache": False, "budget": 5.0} | how))


class Attempts:
    """Passes if the kept modules include one of the sets in `enough`; records every attempt."""

    def __init__(self, *enough, most=1000):
        self.enough, self.tried, self.most = [set(each) for each in enough], [], most

    def __call__(self, modules):
        self.tried.append("".join(modules))
        passes = any(each <= set(modules) for each in self.enough)
        return CheckResult("pass" if passes else "fail")

    def search(self, order):
        return search_fewest(order, self, lambda: len(self.tried) < self.most)


class Energy(nn.Module):
    """Overflows float16 inside, though its result fits."""

    def forward(self, x):
        return (x.square() + 1).sqrt()


class Offset(nn.Module):
    """Loses all digits of a small number in bfloat16."""

    def forward(self, x, *, by):
        return (x + by["large"]) - by["large"]


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = nn.Conv2d(3, 8, 3), middle, nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def seeded(make, *args):
    torch.manual_seed(0)
    return make(*args).eval()


LOUD = 1000 * torch.linspace(-1, 1, 2 * 3 * 12 * 12).view(2, 3, 12, 12)
