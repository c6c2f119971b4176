"""The small layers that mixers share."""

import pytest
import torch

from hf_memmix.mixers.layers import RMSNorm
from hf_memmix.mixers.mamba2 import GatedRMSNorm
from testing import assert_same

# squares of 16-bit inputs of this size are infinite in fp16 and lose digits in bf16
NORMS = {
    "RMSNorm": lambda x: RMSNorm(16, 1e-6).to(x.dtype)(x),
    "GatedRMSNorm": lambda x: GatedRMSNorm(16, 1, 1e-6).to(x.dtype)(x, torch.ones_like(x)),
}


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("size", (1.0, 1e3, 1e4))
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_large_inputs_in_16_bits(norm, size, dtype, tolerance):
    x = (size * torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(0))).clamp(-6e4, 6e4).to(dtype)
    assert_same(NORMS[norm](x), NORMS[norm](x.double()), tolerance=tolerance)
