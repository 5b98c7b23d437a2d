"""Work under the transforms of torch.func, and the older ones of autograd: `vmap` knows no memory formats."""

import torch
from torch import Tensor

# The mode of the older vmap, which `torch.autograd.functional.jacobian(vectorize=True)` uses.
_OLD_VMAP = torch._C._dispatch_key_parse("VmapMode")


def is_transformed() -> bool:
    """Return whether a transform runs, as `vmap`, `grad` or `jvp`; also in a forward that is compiled."""
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.compiler.is_compiling():
        return False
    return torch._C._dispatch_tls_is_dispatch_key_included(_OLD_VMAP)


def rows_copied(x: Tensor) -> Tensor:
    """Return `x` (N, C, *spatial) in channels-last, in operations that every transform knows."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)
