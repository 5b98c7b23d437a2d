"""Small networks that tests prepare, and ways to look at them."""

import copy
from pathlib import Path

import torch
from torch import nn

CONF = Path(__file__).parent.parent / "conf"


def small_2d() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1),
        nn.ConvTranspose2d(4, 2, 2),
    )


def small_3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 8, 3),
        nn.InstanceNorm3d(8, affine=True),
        nn.Conv3d(8, 4, 1),
        nn.ConvTranspose3d(4, 2, 2),
    )


class Tied(nn.Module):
    """Two convolutions with one weight, a linear layer and an embedding with another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(4, 4, 3, padding=1)
        self.decoder = nn.Conv2d(4, 4, 3, padding=1)
        self.decoder.weight = self.encoder.weight
        self.embedding = nn.Embedding(4, 6)
        self.head = nn.Linear(6, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def mixed() -> nn.Module:
    """Convolutions of both ranks, norms, ties, integers, complex numbers, and a 4-d parameter apart."""
    model = nn.ModuleDict({"flat": small_2d(), "deep": small_3d(), "tied": Tied()})
    model.register_parameter("position", nn.Parameter(torch.randn(1, 4, 5, 5)))
    model.register_parameter("phase", nn.Parameter(torch.randn(3, dtype=torch.complex64)))
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("scale", torch.rand(3, dtype=torch.float64))
    return model.eval()


def model_configs() -> list[str]:
    """The names of all ready-made networks."""
    return sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "custom")


def build(name: str) -> nn.Module:
    """The ready-made network of that name; skips the test where its package cannot be imported."""
    import hydra.utils
    import pytest
    from omegaconf import OmegaConf

    config = OmegaConf.load(CONF / "model" / f"{name}.yaml").model
    package = config._target_.split(".")[0]
    if package in ("torchvision", "timm"):
        pytest.importorskip(package)
    return hydra.utils.instantiate(config, _convert_="all").eval()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under every name."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def facts(model: nn.Module) -> dict[str, tuple]:
    """Everything that preparing may change about a model, tensor by tensor, and its hooks."""
    found = {
        name: (
            id(t),
            t.stride(),
            t.dtype,
            t.device,
            t.requires_grad,
            bits(t),
            t._backward_hooks is None,
        )
        for name, t in tensors(model).items()
    }
    hooks = {
        f"{name}:{table}": tuple(map(id, getattr(module, table).values()))
        for name, module in model.named_modules()
        for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    }
    classes = {
        f"{name}:class": (id(module), type(module)) for name, module in model.named_modules()
    }
    return found | hooks | classes


def bits(tensor: torch.Tensor) -> bytes:
    """The values of a tensor, bit for bit, whatever its strides."""
    if tensor.device.type == "meta":
        return b""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(model: nn.Module, reference: nn.Module) -> None:
    """Asserts that both hold the same tensors: names, types, every stride and every bit."""
    ours, theirs = tensors(model), tensors(reference)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        wanted = theirs[name]
        assert (name, tensor.dtype, tensor.stride()) == (name, wanted.dtype, wanted.stride())
        assert bits(tensor) == bits(wanted), name


def clone(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
