"""Test the imported switches with the released packages; a package that is missing skips its tests.

Importing Lightning and transformers takes seconds, so their tests are slow; docs/frameworks.md runs both.
"""

import importlib
import inspect
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from prepare.errors import ConfigError, RefusedError
from prepare.pipeline import Pipeline

STEPS = {"device": {"device": "cpu"}, "conv2d_memory_format": {}}
LAST = (27, 1, 9, 3)
pytestmark = [
    # Warnings of the packages, about themselves.
    pytest.mark.filterwarnings("ignore")
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))


def loader():
    images, masks = torch.randn(4, 3, 8, 8), torch.randint(0, 2, (4, 6, 6))
    return DataLoader(TensorDataset(images, masks), batch_size=2)


class Seen(nn.Module):
    """Returns its input, which must be in channels-last."""

    def forward(self, x):
        assert x.is_contiguous(memory_format=torch.channels_last)
        return x


# ------------------------------------------------------------------------------ the recipe


# ------------------------------------------------------------------------------ Lightning


@pytest.fixture
def segmenter():
    lightning = pytest.importorskip("lightning")

    class Segmenter(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(Seen(), network())

        def training_step(self, batch, index):
            images, masks = batch
            return nn.functional.cross_entropy(self.net(images), masks)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), fused=True)

    return Segmenter


def fit(module, callbacks, folder, **options):
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    trainer = lightning.Trainer(
        max_epochs=options.pop("epochs", 1),
        accelerator="cpu",
        callbacks=callbacks,
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), **options)
    return trainer


@pytest.mark.slow
def test_lightning_prepares_and_formats(segmenter, tmp_path):
    from prepare.frameworks.lightning import Prepare

    with pytest.raises(RefusedError, match="'nte' is not a module; did you mean 'net'"):
        fit(segmenter(), [Prepare(STEPS, module="nte")], tmp_path)
    trainer = fit(segmenter(), [Prepare(STEPS)], tmp_path)
    (optimizer,) = trainer.optimizers
    weight = trainer.lightning_module.net[1][0].weight
    assert weight.stride() == optimizer.state[weight]["exp_avg"].stride() == LAST


@pytest.mark.slow
def test_lightning_keeps_the_layout_when_a_checkpoint_is_loaded(segmenter, tmp_path):
    from prepare.frameworks.lightning import Prepare

    class Plain(segmenter):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), fused=True)

    model = Plain()
    model.net[0] = nn.Identity()
    fit(model, [], tmp_path).save_checkpoint(tmp_path / "plain.ckpt")
    trainer = fit(
        segmenter(), [Prepare(STEPS)], tmp_path, epochs=2, ckpt_path=tmp_path / "plain.ckpt"
    )
    (optimizer,) = trainer.optimizers
    weight = trainer.lightning_module.net[1][0].weight
    assert optimizer.state[weight]["step"] == 4
    assert weight.stride() == optimizer.state[weight]["exp_avg"].stride() == LAST


# ------------------------------------------------------------------------------ Accelerate


def test_accelerate_prepares_before_it_wraps():
    accelerate = pytest.importorskip("accelerate")
    from prepare.frameworks.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Sequential(Seen(), network())
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped, wrapped_optimizer, batches = prepare(
        accelerator, model, optimizer, loader(), recipe=STEPS
    )
    for images, masks in batches:
        accelerator.backward(nn.functional.cross_entropy(wrapped(images), masks))
        wrapped_optimizer.step()
    weight = model[1][0].weight
    assert weight.stride() == optimizer.state[weight]["exp_avg"].stride() == LAST
    with pytest.raises(RefusedError, match="objects: 2 of 2 are models; give one model"):
        prepare(accelerator, model, network(), recipe=STEPS)


# ------------------------------------------------------------------------------ transformers


@pytest.fixture
def train(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=2
    )
    samples = [{"pixel_values": torch.randn(3, 16, 16), "labels": i % 2} for i in range(8)]

    def run(callbacks, steps, **options):
        torch.manual_seed(0)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=2, per_device_train_batch_size=4,
            use_cpu=True, report_to=[], disable_tqdm=True, optim="adamw_torch",
        )  # fmt: skip
        model = transformers.ResNetForImageClassification(config)
        trainer = transformers.Trainer(model, arguments, train_dataset=samples, callbacks=callbacks)
        trainer.train(**options)
        return trainer

    return run


@pytest.mark.slow
def test_the_trainer_prepares_its_model(train):
    from prepare.frameworks.transformers import PrepareCallback

    trainer = train([PrepareCallback(STEPS)], 2)
    weight = next(p for p in trainer.model.parameters() if p.dim() == 4)
    assert weight.stride(1) == 1
    assert trainer.optimizer.state[weight]["exp_avg"].stride() == weight.stride()


# ------------------------------------------------------------------------------ MONAI and Ignite


@pytest.fixture
def handler():
    pytest.importorskip("ignite")
    from prepare.frameworks.monai import PrepareHandler

    return PrepareHandler


def test_a_trainer_of_monai_prepares_when_it_starts(handler):
    engines = pytest.importorskip("monai.engines")
    model = nn.Sequential(Seen(), network())
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [{"image": torch.randn(2, 3, 8, 8), "label": torch.zeros(2, 2, 6, 6)}]
    trainer = engines.SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=2,
        train_data_loader=batches,
        network=model,
        optimizer=optimizer,
        loss_function=nn.MSELoss(),
        train_handlers=[handler(STEPS)],
    )
    trainer.run()
    weight = model[1][0].weight
    assert weight.stride() == optimizer.state[weight]["exp_avg"].stride() == LAST


def test_an_engine_of_ignite_prepares_the_named_network(handler):
    from ignite.engine import Engine

    from prepare.frameworks.outside import Outside

    model, other = network(), network()
    engine = Engine(lambda engine, batch: model(batch).mean() + other(batch).mean())
    handler(STEPS, network=model).attach(engine)
    engine.run([torch.randn(2, 3, 8, 8)])
    assert (model[0].weight.stride() == LAST, other[0].weight.stride() == LAST) == (True, False)
    failing = Engine(lambda engine, batch: 1 / 0)
    handler(STEPS).attach(failing)
    with pytest.raises(ZeroDivisionError):
        failing.run([torch.randn(2, 3, 8, 8)])
    assert Outside.active == []


# ------------------------------------------------------------------------------ nnU-Net


@pytest.fixture
def trainer(monkeypatch):
    """The trainer of nnU-Net, or where it is not installed a stand-in with its method."""
    try:
        import nnunetv2.training.nnUNetTrainer.nnUNetTrainer  # noqa: F401
    except ImportError:

        class nnUNetTrainer:
            @staticmethod
            def build_network_architecture(plans_manager=None, configuration_manager=None):
                return network()

        path = "nnunetv2.training.nnUNetTrainer.nnUNetTrainer"
        for depth in range(1, 5):
            name = ".".join(path.split(".")[:depth])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[path].nnUNetTrainer = nnUNetTrainer
    monkeypatch.delitem(sys.modules, "prepare.frameworks.nnunet", raising=False)
    yield importlib.import_module("prepare.frameworks.nnunet").PrepareTrainer
    sys.modules.pop("prepare.frameworks.nnunet", None)


def test_nnunet_builds_a_prepared_network_by_its_static_call(trainer, monkeypatch, tmp_path):
    monkeypatch.delenv("PREPARE_RECIPE", raising=False)
    with pytest.raises(ConfigError, match="recipe: PrepareTrainer has none; set PREPARE_RECIPE"):
        trainer.build_network_architecture()
    Pipeline.from_config(STEPS).save(tmp_path / "recipe.yaml")
    monkeypatch.setenv("PREPARE_RECIPE", str(tmp_path / "recipe.yaml"))
    assert trainer.build_network_architecture()[0].weight.stride() == LAST
    # nnU-Net reads the names of the arguments from the class and from an object.
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    expected = inspect.signature(nnUNetTrainer.build_network_architecture)
    for holder in (trainer, object.__new__(trainer)):
        assert inspect.signature(holder.build_network_architecture) == expected
    own = type("Own", (trainer,), {"recipe": {}})
    assert own.build_network_architecture()[0].weight.stride() == (27, 9, 3, 1)


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("monai", "ignite", "ignite"), ("lightning", "lightning", "lightning"),
     ("transformers", "transformers", "transformers")],
)  # fmt: skip
def test_a_missing_package_names_the_extra_that_brings_it(monkeypatch, module, package, extra):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"prepare.frameworks.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'torch-prepare\[{extra}\]'"):
        importlib.import_module(f"prepare.frameworks.{module}")
