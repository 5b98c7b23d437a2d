"""nn.ConvTranspose3d (channels_last_3d, float32): its results differ from float64."""
import copy
import torch
from torch import nn

def run(module, given, layout):
    given = given.clone(memory_format=layout).requires_grad_()
    module = copy.deepcopy(module).to(given).to(memory_format=layout)
    out = module(given)
    torch.manual_seed(1)
    gradient = torch.randn(out.shape).to(out)
    out.backward(gradient.to(memory_format=layout))
    return {"outputs": out.detach(), "input gradients": given.grad, **dict(module.named_buffers()),
            **{f"gradient of {n}": p.grad for n, p in module.named_parameters()}}
torch.manual_seed(0)
module = nn.ConvTranspose3d(in_channels=2, out_channels=2, kernel_size=7, stride=2, padding=3, groups=2)
given = torch.randn(1, 2, 3, 1, 1)
right = run(module, given.double(), torch.contiguous_format)
found = run(module, given, torch.channels_last_3d)
for name, exact in right.items():
    error = (found[name].double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
    print(f"{name}: error {error:.1e}")
    assert error <= 0.0001, f"{name}: error {error:.1e}, allowed 0.0001"
print("all right with torch", torch.__version__)
