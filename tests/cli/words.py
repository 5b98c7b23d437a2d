"""Words of the command line that name a small network and its input, and what they compose."""

from contextlib import contextmanager

import hydra

from paths import CONF
from prepare.app.cli.hydra_app import CONFIG_NAME, store_defaults

NET = "model._target_=sample_nets.Net"
SMALL = "input.shape=[2,3,16,16]"
UNET3D = ("model=unet3d", "model.width=2", "model.depth=2", "input.shape=[2,1,8,8,8]")


@contextmanager
def composing(config_dir=None):
    """Initialize Hydra for our command line, and yield what composes words as a run does."""
    store_defaults([])
    more = [f"hydra.searchpath=[file://{config_dir}]"] if config_dir else []

    def compose(*words):
        return hydra.compose(CONFIG_NAME, [*more, *words], return_hydra_config=True)

    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        yield compose
