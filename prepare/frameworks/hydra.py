"""Prepare a network that another Hydra application configures: a `_target_` for its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def prepared(*args: Any, steps: Mapping[str, Any], of: str = "", **options: Any) -> Any:
    """Apply steps to a network that Hydra builds, and return it: a `_target_` for configurations.

    `net._target_=prepare.frameworks.hydra.prepared +net.of=my.Net +net.steps=${prepare.steps}` prepares
    `my.Net` without a line of code: what else the node `net` holds are the arguments of `my.Net`. The inputs
    are formatted by a hook of the model, since the application calls it.

    Args:
        args: positional arguments of `of`.
        steps: a mapping of steps, as in `${prepare.steps}`. A step `device` is left out.
        of: the dotted name of what builds the network.
        options: named arguments of `of`. Without `of`, one argument is the network, or its node.

    Raises:
        ConfigError: the steps are wrong, or what is built is not a module.
    """
    from hydra.utils import get_object
    from torch import nn

    from prepare.errors import ConfigError
    from prepare.frameworks.outside import network_pipeline

    given = [*args, *options.values()]
    network = get_object(of)(*args, **options) if of else given[0] if len(given) == 1 else None
    if not isinstance(network, nn.Module):
        wrong = f"{of or 'what is given'} is a {type(network).__name__} and not a module"
        raise ConfigError("prepared", wrong, "name my.Net as of, with its arguments beside it")
    return network_pipeline(steps).apply(network)
