"""Use the config groups of prepare in another Hydra application, and prepare a model that it configures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def register() -> None:
    """Make the config groups of prepare known to Hydra, below `prepare/`.

    Where this package is installed, Hydra finds them by itself (`hydra_plugins/prepare_groups.py`), and this
    does nothing. An application takes `+prepare=default prepare/memfmt=channels_last_3d` (and
    `prepare/precision`, `prepare/device`, `prepare.steps.half.keep=[]`), and builds its pipeline with
    `Pipeline.from_config(cfg.prepare.steps)`, or names `prepared` in its configuration.
    """
    from hydra.core.plugins import Plugins

    from hydra_plugins.prepare_groups import PrepareGroups, PrepareSearchPath

    plugins = Plugins.instance()
    for plugin in (PrepareSearchPath, PrepareGroups):
        if plugin not in plugins.discover(plugin):
            plugins.register(plugin)


def prepared(
    *args: Any,
    steps: Mapping[str, Any],
    model: nn.Module | None = None,
    of: str = "",
    example: Any = None,
    **options: Any,
) -> nn.Module:
    """Apply steps to a network that Hydra builds, and return it: a `_target_` for configurations.

    `net._target_=prepare.frameworks.hydra.prepared +net.of=my.Net +net.steps=${prepare.steps}` prepares
    `my.Net` without a line of code: what else the node `net` holds are the arguments of `my.Net`. The inputs
    are formatted by a hook of the model, since the application calls it.

    Args:
        args: positional arguments of `of`; without it the network, so that a node with `_partial_` prepares.
        steps: a mapping of steps, as in `${prepare.steps}`.
        model: the network, or its node, in place of `of` and its arguments.
        of: the dotted name of what builds the network.
        example: what `Pipeline.apply` takes, for steps that need one.
        options: named arguments of `of`.

    Raises:
        ConfigError: the steps are wrong, `model` and `of` are given or neither is, or no module comes.
    """
    from hydra.utils import get_object
    from torch import nn

    from prepare.errors import ConfigError
    from prepare.pipeline import Pipeline

    if not of and model is None and len(args) == 1:
        model, args = args[0], ()
    if bool(of) == (model is not None) or (model is not None and (args or options)):
        wrong = "give either model, a node that builds the network, or of, a dotted name"
        remedy = "name my.Net as of, with the arguments of my.Net beside it"
        raise ConfigError("prepared", wrong, remedy)
    network = get_object(of)(*args, **options) if of else model
    if not isinstance(network, nn.Module):
        wrong = f"{of or 'it'} is a {type(network).__name__} and not a module"
        raise ConfigError("model", wrong, "name what returns an nn.Module")
    declared = Pipeline.from_config(steps).to_config()
    formatted = {"input_format": {**declared.get("input_format", {}), "attach": True}}
    return Pipeline.from_config(declared | formatted).apply(network, example=example)
