"""Another Hydra application that uses our config groups."""

from __future__ import annotations

THEIRS = """
import hydra, prepare.frameworks.hydra
from prepare.pipeline import Pipeline
prepare.frameworks.hydra.register()
prepare.frameworks.hydra.register()
with hydra.initialize_config_dir({folder!r}, **{base!r}):
    cfg = hydra.compose("config", ["+prepare=default", "prepare/memfmt=channels_last_3d", "prepare/device=cpu"])
print(prepare.frameworks.hydra.__file__)
print(*Pipeline.from_config(cfg.prepare.steps).steps, cfg.seed)
"""
