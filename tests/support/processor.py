"""The kernels that this processor has: without AVX-512 oneDNN has none for bfloat16, and torch takes slow ones."""

import torch

BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
