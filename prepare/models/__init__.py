"""The example networks of prepare, and what they share; they require torch only."""

import math

from torch import nn

from prepare.core.utils.suggest import choose

NORMS = ("batch", "group", "instance")


def build_norm(name: str, *, channels: int, dims: int) -> nn.Module:
    """Return the normalisation called `name` over `channels` channels of a `dims`-d image.

    Group norm has 8 groups, or as many fewer as divide the channels evenly. Instance norm is
    affine, as nnU-Net uses it. Raises ValueError if `name` is not in `NORMS`.
    """
    if name not in NORMS:
        raise ValueError(f"norm: {name!r} is not a normalisation; {choose(name, NORMS)}")
    if name == "group":
        # Wu and He 2018 (arXiv:1803.08494) use 32 groups; these networks are narrower.
        return nn.GroupNorm(math.gcd(8, channels), channels)
    if name == "instance":
        return getattr(nn, f"InstanceNorm{dims}d")(channels, affine=True)
    return getattr(nn, f"BatchNorm{dims}d")(channels)


def check_positive(**counts: int) -> None:
    """Raise ValueError naming the first of `counts` that is not a whole number above zero."""
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"{name}: {count!r} is not a count; give a whole number of at least 1")
