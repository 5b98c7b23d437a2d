"""A trainer of nnU-Net v2 that prepares its network as it is built, in training and in prediction."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from prepare.errors import ConfigError
from prepare.frameworks.outside import network_pipeline


class PrepareTrainer(nnUNetTrainer):
    """nnU-Net's trainer with the recipe whose path is in `PREPARE_RECIPE`.

    nnU-Net finds a trainer by the name of its class in the files of the folder `nnUNet_extTrainer`. The
    network is prepared before it is moved, compiled, wrapped or given an optimizer.

    Raises:
        ConfigError: there is no recipe.
    """

    # nnU-Net reads from the wrapped one which arguments to give.
    @staticmethod
    @wraps(nnUNetTrainer.build_network_architecture)
    def build_network_architecture(*args: Any, **kwargs: Any) -> Any:
        """Build the network as nnU-Net does, and prepare it."""
        if (recipe := os.environ.get("PREPARE_RECIPE")) is None:
            raise ConfigError("recipe", "PrepareTrainer has none", "set PREPARE_RECIPE=recipe.yaml")
        network = nnUNetTrainer.build_network_architecture(*args, **kwargs)
        return network_pipeline(recipe).apply(network)
