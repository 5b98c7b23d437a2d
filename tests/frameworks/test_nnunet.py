"""The trainer for nnU-Net with the released package: found, trained for a step, saved and used to predict."""

import importlib
import json
import sys
import types

import pytest
import torch

from prepare.pipeline import Pipeline

RECIPE = {"conv3d_memory_format": {}, "repair_layout": {"force": True}}
LAST = (27, 1, 9, 3, 1)  # of a weight with one input channel, channels_last_3d
ARCHITECTURE = {
    "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
    "arch_kwargs": {
        "n_stages": 3, "features_per_stage": [4, 8, 16], "kernel_sizes": [[3, 3, 3]] * 3,
        "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 2]], "n_conv_per_stage": [1, 1, 1],
        "n_conv_per_stage_decoder": [1, 1], "conv_bias": True, "dropout_op": None, "dropout_op_kwargs": None,
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d", "norm_op_kwargs": {"affine": True},
        "nonlin": "torch.nn.LeakyReLU", "nonlin_kwargs": {"inplace": True},
    },
    "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
}  # fmt: skip
RESAMPLING = {
    f"resampling_fn_{of}{what}": {} if what else "resample_data_or_seg_to_shape"
    for of in ("data", "seg", "probabilities")
    for what in ("", "_kwargs")
}
CONFIGURATION = {
    "data_identifier": "tiny", "preprocessor_name": "DefaultPreprocessor", "batch_size": 2,
    "patch_size": [16, 16, 16], "spacing": [1, 1, 1], "median_image_size_in_voxels": [16, 16, 16],
    "normalization_schemes": ["ZScoreNormalization"], "use_mask_for_norm": [False], "batch_dice": False,
    "architecture": ARCHITECTURE, **RESAMPLING,
}  # fmt: skip
PLANS = {
    "dataset_name": "Dataset001_Tiny", "plans_name": "nnUNetPlans", "label_manager": "LabelManager",
    "image_reader_writer": "SimpleITKIO", "transpose_forward": [0, 1, 2], "transpose_backward": [0, 1, 2],
    "original_median_spacing_after_transp": [1, 1, 1], "experiment_planner_used": "by hand",
    "original_median_shape_after_transp": [16, 16, 16], "continue_training": False,
    "foreground_intensity_properties_per_channel": {}, "configurations": {"3d_fullres": CONFIGURATION},
}  # fmt: skip
DATASET = {
    "channel_names": {"0": "CT"}, "labels": {"background": 0, "thing": 1}, "numTraining": 2,
    "file_ending": ".nii.gz",
}  # fmt: skip


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
    (tmp_path / "trainers" / "own_trainer.py").write_text(
        "from prepare.frameworks.nnunet import PrepareTrainer\n"
    )
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
    trainer = found(json.loads(json.dumps(PLANS)), "3d_fullres", 0, DATASET, torch.device("cpu"))
    trainer.initialize()
    weight = first(trainer.network).conv.weight
    assert weight.stride() == LAST
    assert type(first(trainer.network).norm).__name__ == "KeepingInstanceNorm3d"
    before = weight.detach().clone()
    batch = {
        "data": torch.randn(2, 1, 16, 16, 16),
        "target": [torch.randint(0, 2, (2, 1, *[16 // n] * 3)).float() for n in (1, 2)],
    }
    losses = [float(trainer.train_step(batch)["loss"]) for _ in range(3)]
    assert losses[-1] < losses[0]
    assert weight.grad.stride() == LAST
    assert not torch.equal(weight, before)

    folder = tmp_path / "trained"
    (folder / "fold_0").mkdir(parents=True)
    (folder / "plans.json").write_text(json.dumps(PLANS))
    (folder / "dataset.json").write_text(json.dumps(DATASET))
    trainer.my_init_kwargs["plans"] = PLANS
    trainer.save_checkpoint(str(folder / "fold_0" / "checkpoint_final.pth"))
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(
        use_mirroring=False,
        use_gaussian=False,
        perform_everything_on_device=False,
        device=torch.device("cpu"),
    )
    predictor.initialize_from_trained_model_folder(str(folder), (0,))
    assert first(predictor.network).conv.weight.stride() == LAST
    logits = predictor.predict_logits_from_preprocessed_data(batch["data"][0])
    trainer.set_deep_supervision_enabled(False)
    trainer.network.eval()
    with torch.no_grad():
        expected = trainer.network(batch["data"][:1])[0]
    assert torch.allclose(logits.float(), expected, atol=0.02)
