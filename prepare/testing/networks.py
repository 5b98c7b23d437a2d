"""A network with something for every step in it, and everything that preparing may change about one."""

import torch
from torch import Tensor, nn

# What of a module may change while it stays the same object: its class, its mode, and its hooks.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def small_2d() -> nn.Module:
    """Convolutions in two dimensions, one of them 1x1, and a norm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1),
        nn.ConvTranspose2d(4, 2, 2),
    )


def small_3d() -> nn.Module:
    """Convolutions in three dimensions, the first of one channel, and a norm."""
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

    def forward(self, x: Tensor) -> Tensor:
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


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every name."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def facts(model: nn.Module) -> dict[str, tuple]:
    """Everything that preparing may change about a model: each tensor, each module's class and hooks.

    Tensors stand under their own name, what is a module's under `name:what`.
    """
    found: dict[str, tuple] = {}
    for name, t in tensors(model).items():
        found[name] = (id(t), t.stride(), t.dtype, t.device, t.requires_grad, bits(t))
        found[name] += (t._backward_hooks is None,)
    for name, module in model.named_modules():
        found[f"{name}:class"] = (id(module), type(module), module.training)
        for table in _HOOKS:
            found[f"{name}:{table}"] = tuple(map(id, getattr(module, table).values()))
    return found


def bits(tensor: Tensor) -> bytes:
    """The values of a tensor, bit for bit, whatever its strides."""
    if tensor.device.type == "meta":
        return b""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
