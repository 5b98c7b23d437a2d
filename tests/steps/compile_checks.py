"""A small network, and a pipeline that compiles it."""

from torch import nn

from prepare.pipeline import Pipeline


class Net(nn.Module):
    """One convolution of a user's own class."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).relu()


def pipeline(**options):
    return Pipeline.from_config({"compile": {"backend": "eager", **options}})
