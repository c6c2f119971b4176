"""Random inputs of the kernels' tests, on the device on which the tests run."""

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*size, dtype=torch.float64).to(DEVICE, dtype)


def rand(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(*size, dtype=torch.float64).to(DEVICE, dtype)
