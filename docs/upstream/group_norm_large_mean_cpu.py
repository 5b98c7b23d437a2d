"""nn.GroupNorm (channels_last, float32): its results differ from float64."""
import copy
import torch
from torch import nn

def run(module, given, layout):
    given = given.clone(memory_format=layout).requires_grad_()
    module = copy.deepcopy(module).to(given).to(memory_format=layout)
    out = module(given)
    return {"outputs": out.detach()}
torch.manual_seed(0)
module = nn.GroupNorm(num_groups=1, num_channels=5)
given = torch.randn(1, 5, 2, 3) + 1000
right = run(module, given.double(), torch.contiguous_format)
found = run(module, given, torch.channels_last)
for name, exact in right.items():
    error = (found[name].double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
    print(f"{name}: error {error:.1e}")
    assert error <= 0.0001, f"{name}: error {error:.1e}, allowed 0.0001"
print("all right with torch", torch.__version__)
