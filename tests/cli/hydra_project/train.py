"""A project of somebody else's, in the shape of lightning-hydra-template: its own groups, `prepare` beside them."""

import json
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import prepare.frameworks.hydra
from prepare.pipeline import Pipeline

BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}

prepare.frameworks.hydra.register()


@hydra.main(config_path="configs", config_name="train", **BASE)
def main(cfg: DictConfig) -> None:
    """Trains, and leaves what came of it in the folder of the run."""
    torch.manual_seed(cfg.seed)
    model, data, trainer = map(hydra.utils.instantiate, (cfg.model, cfg.data, cfg.trainer))
    pipeline = Pipeline.from_config(cfg.get("prepare", {}).get("steps", {}))
    losses = trainer.fit(model, data, pipeline)
    found = {
        "losses": losses,
        "strides": {name: tensor.stride() for name, tensor in model.named_parameters()},
        "steps": pipeline.to_config(),
        "device": cfg.device.name,
    }
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
