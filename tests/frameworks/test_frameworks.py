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

    model = segmenter()
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
    both = network(), network()
    prepare(accelerator, *both, recipe=STEPS)
    assert [each[0].weight.stride() for each in both] == [LAST] * 2
    with pytest.raises(ConfigError, match="Linear has no Conv2d"):
        prepare(accelerator, nn.Linear(2, 2), recipe=STEPS)


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

    model, other = network(), Seen()
    other.conv = network()[0]
    engine = Engine(lambda engine, batch: model(batch).mean() + other.conv(batch).mean())
    handler(STEPS, module="Seq*").attach(engine)
    engine.run([torch.randn(2, 3, 8, 8)])
    assert (model[0].weight.stride() == LAST, other.conv.weight.stride() == LAST) == (True, False)
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


# ------------------------------------------------------------------------------ shapes of programs


def lightning_module(kind):
    """Return a LightningModule as people write it, and its networks once it has been fitted."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = kind != "gan"
            if kind == "own layers":
                self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)
            elif kind != "late":
                self.net, self.other = network(), network()

        def configure_model(self):
            if kind == "late" and not hasattr(self, "net"):
                self.net = network()

        def training_step(self, batch, index):
            if kind == "own layers":
                return self.last(self.first(batch[0]).relu()).square().mean()
            if kind != "gan":
                return self.net(batch[0]).square().mean()
            for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
                optimizer.zero_grad()
                self.manual_backward(net(batch[0]).square().mean())
                optimizer.step()
            return None

        def configure_optimizers(self):
            if kind == "no optimizer":
                return None
            if kind == "gan":
                return [torch.optim.Adam(net.parameters()) for net in (self.net, self.other)]
            if kind == "frozen":
                self.net[0].requires_grad_(False)
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])

    return Module()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own layers", "late", "gan", "no optimizer", "frozen", "plain"])
def test_modules_of_lightning_run_and_are_prepared(kind, tmp_path):
    from prepare.frameworks.lightning import Prepare

    trainer = fit(lightning_module(kind), [Prepare(STEPS)], tmp_path)
    module = trainer.lightning_module
    called = (
        [module]
        if kind == "own layers"
        else [module.net, *([module.other] if kind == "gan" else [])]
    )
    weights = [p for net in called for p in net.parameters() if p.dim() == 4]
    assert [p.stride(1) for p in weights] == [1] * len(weights)
    assert trainer.global_step == (4 if kind == "gan" else 2)


@pytest.mark.slow
def test_each_model_of_model_init_is_prepared(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from prepare.frameworks.transformers import PrepareCallback

    made = []

    def model_init():
        config = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=2
        )
        made.append(transformers.ResNetForImageClassification(config))
        return made[-1]

    samples = [{"pixel_values": torch.randn(3, 16, 16), "labels": i % 2} for i in range(8)]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    callbacks = [PrepareCallback(STEPS)]
    trainer = transformers.Trainer(
        model_init=model_init, args=arguments, train_dataset=samples, callbacks=callbacks
    )
    trainer.train()
    assert next(p for p in made[-1].parameters() if p.dim() == 4).stride(1) == 1
    assert len(made) == 2


def test_both_networks_of_a_gan_trainer_are_prepared(handler):
    engines = pytest.importorskip("monai.engines")
    maker, critic = network(), nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.LazyLinear(1))
    critic(torch.zeros(1, 2, 6, 6))
    trainer = engines.GanTrainer(
        device=torch.device("cpu"),
        max_epochs=1,
        train_data_loader=DataLoader(torch.randn(4, 2, 6, 6), batch_size=2),
        g_network=maker,
        g_optimizer=torch.optim.Adam(maker.parameters()),
        g_loss_function=lambda scores: -scores.mean(),
        d_network=critic,
        d_optimizer=torch.optim.Adam(critic.parameters()),
        d_loss_function=lambda made, real: (critic(made) - critic(real)).mean(),
        g_prepare_batch=lambda **_: torch.randn(2, 3, 8, 8),
        d_prepare_batch=lambda batch, *_, **__: batch,
        g_update_latents=False,
        train_handlers=[handler(STEPS)],
    )
    trainer.run()
    assert [net[0].weight.stride(1) for net in (maker, critic)] == [1, 1]


@pytest.mark.slow
def test_a_diffusion_training_with_an_ema_runs_under_outside():
    diffusers = pytest.importorskip("diffusers")
    from diffusers.training_utils import EMAModel

    import prepare

    net = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 8), down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    ema = EMAModel(net.parameters(), model_cls=diffusers.UNet2DModel, model_config=net.config)
    noises = diffusers.DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(net.parameters())
    found = prepare.outside({**STEPS, "repair_layout": {}})
    for _ in range(3):
        images, noise = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
        steps = torch.randint(0, 1000, (2,))
        loss = (net(noises.add_noise(images, noise, steps), steps).sample - noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.step(net.parameters())
    ema.copy_to(net.parameters())
    lines = list(found.lines())
    found.stop()
    assert net.conv_in.weight.stride(1) == 1
    assert "UNet2DModel" in lines[0]
    assert "layout" in lines[1]
