"""The trainer for nnU-Net with the released package: found, trained for a step, saved and used to predict."""

import copy
import importlib
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from prepare.pipeline import Pipeline

RECIPE = {"conv3d_memory_format": {}, "repair_layout": {"force": True}}
LAST = (27, 1, 9, 3, 1)  # of a weight with one input channel, channels_last_3d
TINY = json.loads(Path(__file__).with_name("nnunet_plans.json").read_text())


@pytest.fixture
def found(monkeypatch, tmp_path):
    """Let nnU-Net find the trainer in a folder, by the name of its class."""
    pytest.importorskip("nnunetv2", reason="needs nnU-Net")
    for name in ("raw", "preprocessed", "results", "trainers"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(f"nnUNet_{name}", str(tmp_path / name))
    monkeypatch.setenv("nnUNet_extTrainer", str(tmp_path / "trainers"))
    data = tmp_path / "preprocessed" / "Dataset001_Tiny" / "tiny"
    data.mkdir(parents=True)
    (data / "case.npz").touch()
    code = "from prepare.frameworks.nnunet import PrepareTrainer\n"
    (tmp_path / "trainers" / "own_trainer.py").write_text(code)
    Pipeline.from_config(RECIPE).save(tmp_path / "recipe.yaml")
    monkeypatch.setenv("PREPARE_RECIPE", str(tmp_path / "recipe.yaml"))
    try:
        importlib.import_module("timm.layers")
    except ImportError:  # it needs torchvision, and one of nnU-Net's own trainers needs it
        name = "nnunetv2.training.nnUNetTrainer.primus.primus_trainers"
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

    yield recursive_find_trainer_class_by_name("PrepareTrainer")
    sys.modules.pop("prepare.frameworks.nnunet", None)


def first(network):
    return network.encoder.stages[0][0].convs[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of nnU-Net and its dependencies
def test_nnunet_trains_saves_and_predicts_with_a_prepared_network(found, tmp_path):
    plans, dataset = copy.deepcopy(TINY["plans"]), TINY["dataset"]
    trainer = found(plans, "3d_fullres", 0, dataset, torch.device("cpu"))
    trainer.initialize()
    weight = first(trainer.network).conv.weight
    assert weight.stride() == LAST
    assert type(first(trainer.network).norm).__name__ == "KeepingInstanceNorm3d"
    batch = {
        "data": torch.randn(2, 1, 16, 16, 16),
        "target": [torch.randint(0, 2, (2, 1, *[16 // n] * 3)).float() for n in (1, 2)],
    }
    losses = [float(trainer.train_step(batch)["loss"]) for _ in range(3)]
    assert losses[-1] < losses[0]
    assert weight.grad.stride() == LAST

    folder = tmp_path / "trained"
    (folder / "fold_0").mkdir(parents=True)
    (folder / "plans.json").write_text(json.dumps(TINY["plans"]))
    (folder / "dataset.json").write_text(json.dumps(dataset))
    trainer.my_init_kwargs["plans"] = TINY["plans"]
    trainer.save_checkpoint(str(folder / "fold_0" / "checkpoint_final.pth"))
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    plain = dict.fromkeys(("use_mirroring", "use_gaussian", "perform_everything_on_device"), False)
    predictor = nnUNetPredictor(**plain, device=torch.device("cpu"))
    predictor.initialize_from_trained_model_folder(str(folder), (0,))
    assert first(predictor.network).conv.weight.stride() == LAST
    logits = predictor.predict_logits_from_preprocessed_data(batch["data"][0])
    trainer.set_deep_supervision_enabled(False)
    trainer.network.eval()
    with torch.no_grad():
        expected = trainer.network(batch["data"][:1])[0]
    assert torch.allclose(logits.float(), expected, atol=0.02)
