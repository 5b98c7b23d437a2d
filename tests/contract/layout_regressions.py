"""Layout regressions as changes to a network: each must break the contract of the unchanged one."""

import torch
from torch import nn
from torch.nn import functional as F

FLAT = {"conv2d_memory_format": {}}


class Net(nn.Module):
    """Two levels with a skip connection, as in a U-Net; `middle` and `norm` may be replaced."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = nn.Identity()
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        skip = self.norm(self.stem(x)).relu()
        x = self.up(self.middle(self.down(skip)).relu())
        return self.head(torch.cat([x, skip], 1))


def net():
    torch.manual_seed(0)
    model = Net()
    nn.init.normal_(model.norm.weight, 1.0, 0.2)
    return model


BATCH = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def after(name, change):
    """Return a regression: `change` is applied to the output of a module, in its own forward."""

    def regress(model):
        module = model.get_submodule(name)
        forward = module.forward
        module.forward = lambda *args: change(forward(*args))

    return regress


def replaced(name, build):
    return lambda model: setattr(model, name, build())


def rewritten(forward):
    """Return a regression: a dependency's new version has another forward of the network."""

    def regress(model):
        model.__class__ = type("Net", (Net,), {"forward": forward})

    return regress


def a_permute_moved(self, x):
    skip = self.norm(self.stem(x)).relu()
    x = self.down(skip).permute(0, 2, 3, 1).contiguous().relu()
    x = self.up(self.middle(x.reshape(len(x), 16, 8, 8)))
    return self.head(torch.cat([x, skip], 1))


def a_loop_over_samples(self, x):
    skip = self.norm(self.stem(x)).relu()
    parts = [self.up(self.middle(self.down(each[None])).relu()) for each in skip]
    return self.head(torch.cat([torch.stack([p[0].contiguous() for p in parts]), skip], 1))


def a_flattened_skip(self, x):
    skip = self.norm(self.stem(x)).relu()
    x = self.up(self.middle(self.down(skip)).relu())
    skip = skip.flatten(2).clone(memory_format=torch.contiguous_format).view_as(x)
    return self.head(torch.cat([x, skip], 1))


def looks_at_its_layout(self, x):
    x = Net.forward(self, x)
    return x if x.is_contiguous() else x * 1.01


class Attention(nn.Module):
    def forward(self, x):
        flat = x.flatten(2).contiguous()
        return (flat @ (flat.transpose(1, 2) @ flat).softmax(-1)).view_as(x)


# With a recipe: the network changes before it is prepared.
OF_NETWORK = {
    "contiguous() added": after("down", lambda x: x.contiguous()),
    "contiguous() behind the norm": after("norm", lambda x: x.contiguous()),
    "clone in the default format": after("stem", lambda x: x.clone(memory_format=torch.contiguous_format)),
    "GroupNorm in place of BatchNorm": replaced("norm", lambda: nn.GroupNorm(2, 8)),
    "InstanceNorm in place of BatchNorm": replaced("norm", lambda: nn.InstanceNorm2d(8, affine=True)),
    "LayerNorm over (C, H, W)": replaced("middle", lambda: nn.LayerNorm((16, 8, 8))),
    "softmax in the middle": after("middle", lambda x: x.softmax(1)),
    "layer norm as a function": after("middle", lambda x: F.layer_norm(x, x.shape[1:])),
    "attention in the middle": replaced("middle", Attention),
    "circular padding": after("middle", lambda x: F.pad(x, (1, 1, 1, 1), mode="circular")[..., 1:-1, 1:-1]),
    "repeat": after("middle", lambda x: x[:, :8].repeat(1, 2, 1, 1)),
    "cumsum": after("middle", lambda x: x.cumsum(1)),
    "index_select": after("middle", lambda x: x.index_select(2, torch.arange(8))),
    "grid_sample": after("middle", lambda x: F.grid_sample(x, x.new_zeros(2, 8, 8, 2), align_corners=False)),
    "a reshape that copies": after("middle", lambda x: x.reshape(2, 4, -1).reshape(2, 16, 8, 8)),
    "a permute moved": rewritten(a_permute_moved),
    "a loop over samples": rewritten(a_loop_over_samples),
    "a flattened skip": rewritten(a_flattened_skip),
    "a cast in the middle": after("down", lambda x: x.bfloat16().float()),
    "a convolution in float16": after("middle", lambda x: x.half().float()),
    "a branch on the layout": rewritten(looks_at_its_layout),
    "weight_norm": lambda model: nn.utils.parametrizations.weight_norm(model.down),
    "another kernel size": replaced("stem", lambda: nn.Conv2d(3, 8, 5, padding=2)),
}  # fmt: skip
# With another recipe than that of the contract.
OF_RECIPE = {
    "one convolution left out by a pattern": {"conv2d_memory_format": {"exclude": ["down"]}},
    "the format dropped": {"conv2d_memory_format": {"memory_format": "contiguous"}},
    "weights in bfloat16": {**FLAT, "half": {"dtype": "bfloat16"}},
}


def undone_by_a_checkpoint(model, optimizer):
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def a_state_in_another_layout(model, optimizer):
    state = optimizer.state[model.down.weight]
    state["exp_avg"] = state["exp_avg"].contiguous()


def a_convolution_added_later(model, optimizer):
    model.middle = nn.Conv2d(16, 16, 3, padding=1)


def made_contiguous(model, optimizer):
    model.to(memory_format=torch.contiguous_format)


def a_fresh_head(model, optimizer):
    model.up = nn.ConvTranspose2d(16, 8, 2, 2)


def moved_to_float64(model, optimizer):
    model.norm.double()
    model.norm.forward = lambda x: F.batch_norm(x.double(), None, None, training=True).float()


# Without a recipe: the model was prepared, and something happened to it since.
OF_PREPARED = [
    undone_by_a_checkpoint,
    a_state_in_another_layout,
    a_convolution_added_later,
    made_contiguous,
    a_fresh_head,
    moved_to_float64,
]
