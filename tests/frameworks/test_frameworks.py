"""Programs of other frameworks run as without us, under `outside` and with the adapter; a missing package skips."""

import importlib
import inspect
import sys
import types
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from prepare.errors import ConfigError, RefusedError
from prepare.frameworks.outside import Outside
from prepare.pipeline import Pipeline

STEPS = {"device": {"device": "cpu"}, "conv2d_memory_format": {}, "repair_layout": {}}
LAST = (27, 1, 9, 3)
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages, about themselves


class Seen(nn.Module):
    """Returns its input, and remembers whether that was in channels-last."""

    def forward(self, x):
        self.is_last = x.stride(1) == 1
        return x


def network():
    return nn.Sequential(Seen(), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))


def loader():
    images, masks = torch.randn(4, 3, 8, 8), torch.randint(0, 2, (4, 6, 6))
    return DataLoader(TensorDataset(images, masks), batch_size=2)


def are_last(nets):
    """Return what holds of the inputs and weights: all in channels-last, none, or both."""
    modules = [each for net in nets for each in net.modules()]
    convolutions = [each for each in modules if isinstance(each, nn.Conv2d)]
    weights = {each.weight.stride(1) == 1 for each in convolutions if each.kernel_size > (1, 1)}
    return weights | {each.is_last for each in modules if isinstance(each, Seen)}


# ------------------------------------------------------------------------------ Lightning


def lightning_module(kind):
    """Return a LightningModule as people write it; it holds its networks once it has been fitted."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization, self.losses = kind != "several", []
            if kind == "own layers":
                self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)
            elif kind != "late":
                self.net, self.other = network(), network() if kind == "several" else None

        def configure_model(self):
            if kind == "late" and not hasattr(self, "net"):
                self.net = network()

        def loss(self, net, batch):
            self.losses.append(nn.functional.cross_entropy(net(batch[0]), batch[1]))
            return self.losses[-1]

        def training_step(self, batch, index):
            if kind == "own layers":
                return self.loss(lambda x: self.last(self.first(x).relu()), batch)
            if kind != "several":
                return self.loss(self.net, batch)
            for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
                optimizer.zero_grad()
                self.manual_backward(self.loss(net, batch))
                optimizer.step()
            return None

        def configure_optimizers(self):
            if kind == "frozen":
                self.net[1].requires_grad_(False)
            if kind == "several":
                return [torch.optim.Adam(net.parameters()) for net in (self.net, self.other)]
            trained = [p for p in self.parameters() if p.requires_grad]
            return None if kind == "no optimizer" else torch.optim.AdamW(trained, fused=True)

    return Module()


def fit(module, callbacks, folder, *, epochs=1, **options):
    import lightning

    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=callbacks, logger=False,
        default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, loader(), **options)
    return trainer


def of_lightning(kind):
    def program(folder, adapter):
        module = lightning_module(kind)
        trainer = fit(module, [adapter(STEPS)] if adapter else [], folder)
        return [*map(float, module.losses)], [module], trainer.optimizers

    return program


# ------------------------------------------------------------------------------ transformers


def of_the_trainer(folder, adapter, *, searches=False):
    """Train, or search for the learning rate with Optuna, which makes a model for each trial."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    optuna, made, losses = pytest.importorskip("optuna"), [], []

    def model_init():
        config = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=2
        )
        made.append(transformers.ResNetForImageClassification(config))
        return made[-1]

    samples = [{"pixel_values": torch.randn(3, 16, 16), "labels": i % 2} for i in range(8)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        disable_tqdm=True, optim="adamw_torch", logging_steps=1, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(
        args=arguments, train_dataset=samples, eval_dataset=samples, model_init=model_init,
        callbacks=[adapter(STEPS)] if adapter else [],
    )  # fmt: skip
    if searches:
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
            lambda figures: losses.append(figures["eval_loss"]) or losses[-1],
            n_trials=3, direction="minimize", backend="optuna",
            sampler=optuna.samplers.RandomSampler(seed=0),
        )  # fmt: skip
    else:
        trainer.train()
        losses += [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, made[1:], [trainer.optimizer]  # nothing calls the model of the constructor


# ------------------------------------------------------------------------------ others


def of_accelerate(folder, adapter):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, losses = network(), []
    optimizer = torch.optim.AdamW(model.parameters())
    wrap = partial(adapter, accelerator, recipe=STEPS) if adapter else accelerator.prepare
    wrapped, wrapped_optimizer, batches = wrap(model, optimizer, loader())
    for images, masks in batches:
        loss = nn.functional.cross_entropy(wrapped(images), masks)
        accelerator.backward(loss)
        wrapped_optimizer.step()
        losses.append(loss.item())
    return losses, [model], [optimizer]


def of_monai(folder, adapter):
    engines = pytest.importorskip("monai.engines")
    model, losses = network(), []
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = engines.SupervisedTrainer(
        device=torch.device("cpu"), max_epochs=2, network=model, optimizer=optimizer,
        train_data_loader=[{"image": torch.randn(2, 3, 8, 8), "label": torch.zeros(2, 2, 6, 6)}],
        loss_function=nn.MSELoss(), train_handlers=[adapter(STEPS)] if adapter else [], decollate=False,
    )  # fmt: skip
    trainer.add_event_handler(
        "ITERATION_COMPLETED", lambda e: losses.append(e.state.output["loss"].item())
    )
    trainer.run()
    return losses, [model], [optimizer]


def of_a_gan_trainer(folder, adapter):
    engines = pytest.importorskip("monai.engines")
    maker, critic = network(), nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 1))
    optimizers = [torch.optim.Adam(net.parameters()) for net in (maker, critic)]
    losses = []
    trainer = engines.GanTrainer(
        device=torch.device("cpu"), max_epochs=1, g_update_latents=False,
        train_data_loader=DataLoader(torch.randn(4, 2, 6, 6), batch_size=2),
        train_handlers=[adapter(STEPS)] if adapter else [],
        g_network=maker, g_optimizer=optimizers[0], g_loss_function=lambda scores: -scores.mean(),
        g_prepare_batch=lambda **_: torch.randn(2, 3, 8, 8),
        d_network=critic, d_optimizer=optimizers[1], d_prepare_batch=lambda batch, *_, **__: batch,
        d_loss_function=lambda made, real: (critic(made) - critic(real)).mean(),
    )  # fmt: skip
    trainer.add_event_handler(
        "ITERATION_COMPLETED",
        lambda e: losses.extend([e.state.output["g_loss"], e.state.output["d_loss"]]),
    )
    trainer.run()
    return losses, [maker, critic], optimizers


def of_ignite(folder, adapter):
    engine = pytest.importorskip("ignite.engine")
    model, losses = network(), []
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = engine.create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
    trainer.add_event_handler("ITERATION_COMPLETED", lambda e: losses.append(e.state.output))
    if adapter:
        adapter(STEPS, module="Seq*").attach(trainer)
    trainer.run(loader())
    return losses, [model], [optimizer]


def of_diffusers(folder, adapter):
    diffusers = pytest.importorskip("diffusers")
    from diffusers.training_utils import EMAModel

    net = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 8), down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    ema = EMAModel(net.parameters(), model_cls=diffusers.UNet2DModel, model_config=net.config)
    noises = diffusers.DDPMScheduler(num_train_timesteps=1000)
    optimizer, losses = torch.optim.AdamW(net.parameters()), []
    for _ in range(3):
        images, noise = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
        steps = torch.randint(0, 1000, (2,))
        loss = (net(noises.add_noise(images, noise, steps), steps).sample - noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.step(net.parameters())
        losses.append(loss.item())
    return losses, [net], [optimizer]


# A program, and the adapter that does the same as `outside`.
PROGRAMS = {
    **{
        f"lightning, {kind}": (of_lightning(kind), "lightning.Prepare")
        for kind in ("own layers", "late", "several", "no optimizer", "frozen", "plain")
    },
    "trainer": (of_the_trainer, "transformers.PrepareCallback"),
    "model_init with optuna": (
        partial(of_the_trainer, searches=True),
        "transformers.PrepareCallback",
    ),
    "accelerate": (of_accelerate, "accelerate.prepare"),
    "monai": (of_monai, "monai.PrepareHandler"),
    "gan trainer": (of_a_gan_trainer, "monai.PrepareHandler"),
    "ignite": (of_ignite, "monai.PrepareHandler"),
    "diffusers with ema": (of_diffusers, None),
}


@pytest.mark.process
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_losses_without_us_and_is_prepared(name, tmp_path):
    """The noise is that of torch's own kernels, with and without oneDNN."""
    program, adapter = PROGRAMS[name]
    losses = {}
    for way in ("plain", "other kernels", "outside", *([adapter] if adapter else [])):
        torch.manual_seed(0)
        with ExitStack() as stack:
            if way == "other kernels":
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            if way == "outside":
                stack.callback(Outside(STEPS).start().stop)
            with_us = way == adapter and import_adapter(adapter)
            losses[way], nets, optimizers = program(tmp_path / way, with_us)
        assert Outside.active == []
        assert are_last(nets) == {way in ("outside", adapter)}, way
        for optimizer in optimizers:
            moments = [(each, state["exp_avg"]) for each, state in optimizer.state.items()]
            assert [each.stride() for each, _ in moments] == [each.stride() for _, each in moments]
    plain = losses.pop("plain")
    assert len(plain) > 1
    noise = max(abs(a - b) for a, b in zip(plain, losses.pop("other kernels"), strict=True))
    for way, each in losses.items():
        assert each == pytest.approx(plain, rel=1e-5, abs=4 * noise), way


def import_adapter(name):
    module, _, attribute = name.partition(".")
    return getattr(importlib.import_module(f"prepare.frameworks.{module}"), attribute)


# ------------------------------------------------------------------------------ of one adapter


@pytest.mark.slow
def test_lightning_keeps_the_layout_when_a_checkpoint_is_loaded(tmp_path):
    adapter, path = import_adapter("lightning.Prepare"), tmp_path / "plain.ckpt"
    fit(lightning_module("plain"), [], tmp_path).save_checkpoint(path)
    trainer = fit(lightning_module("plain"), [adapter(STEPS)], tmp_path, epochs=2, ckpt_path=path)
    weight, state = next(iter(trainer.optimizers[0].state.items()))
    assert (state["step"], weight.stride(), state["exp_avg"].stride()) == (4, LAST, LAST)
    with pytest.raises(RefusedError, match="'nte' is not a module; did you mean 'net'"):
        fit(lightning_module("plain"), [adapter(STEPS, module="nte")], tmp_path)


def test_accelerate_takes_several_models():
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    prepare, both = import_adapter("accelerate.prepare"), (network(), network())
    prepare(accelerator, *both, recipe=STEPS)
    assert [each[1].weight.stride() for each in both] == [LAST] * 2


def test_a_handler_prepares_the_networks_of_a_class_and_ends_with_its_engine():
    engine = pytest.importorskip("ignite.engine")
    handler = import_adapter("monai.PrepareHandler")
    model, other = network(), nn.Conv2d(3, 8, 3)
    calling = engine.Engine(lambda _, batch: model(batch).mean() + other(batch).mean())
    handler(STEPS, module="Seq*").attach(calling)
    calling.run([torch.randn(2, 3, 8, 8)])
    assert (are_last([model]), are_last([other])) == ({True}, {False})
    failing = engine.Engine(lambda _, batch: 1 / 0)
    handler(STEPS).attach(failing)
    with pytest.raises(ZeroDivisionError):
        failing.run([torch.randn(2, 3, 8, 8)])
    assert Outside.active == []


# ------------------------------------------------------------------------------ nnU-Net


@pytest.fixture
def trainer(monkeypatch):
    """Ours over a stand-in for the trainer of nnU-Net; test_nnunet.py has the released one."""

    class nnUNetTrainer:
        @staticmethod
        def build_network_architecture(plans_manager=None, configuration_manager=None):
            return network()

    path = "nnunetv2.training.nnUNetTrainer.nnUNetTrainer"
    monkeypatch.setitem(sys.modules, path, types.SimpleNamespace(nnUNetTrainer=nnUNetTrainer))
    monkeypatch.delitem(sys.modules, "prepare.frameworks.nnunet", raising=False)
    yield import_adapter("nnunet.PrepareTrainer")
    sys.modules.pop("prepare.frameworks.nnunet", None)


def test_nnunet_builds_a_prepared_network_by_its_static_call(trainer, monkeypatch, tmp_path):
    monkeypatch.delenv("PREPARE_RECIPE", raising=False)
    with pytest.raises(ConfigError, match="recipe: PrepareTrainer has none; set PREPARE_RECIPE"):
        trainer.build_network_architecture()
    Pipeline.from_config(STEPS).save(tmp_path / "recipe.yaml")
    monkeypatch.setenv("PREPARE_RECIPE", str(tmp_path / "recipe.yaml"))
    assert trainer.build_network_architecture()[1].weight.stride() == LAST
    # nnU-Net reads the names of the arguments from the class and from an object.
    holders = trainer, object.__new__(trainer), trainer.__base__
    assert len({inspect.signature(each.build_network_architecture) for each in holders}) == 1


@pytest.mark.parametrize(
    "module", ["monai.ignite", "lightning.lightning", "transformers.transformers"]
)
def test_a_missing_package_names_the_extra_that_brings_it(monkeypatch, module):
    module, _, package = module.partition(".")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"prepare.frameworks.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'torch-prepare\[{package}\]'"):
        importlib.import_module(f"prepare.frameworks.{module}")
