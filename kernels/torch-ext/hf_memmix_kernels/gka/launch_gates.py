"""The launches of the kernels of GKA's gates, for one token per sequence and for whole sequences."""

import torch
from torch import Tensor

from .._groups import flat
from .._launch import cdiv, next_power_of_2
from .._tape import taped
from .arguments import Gates
from .kernels.gates import gka_activations_kernel, gka_gates_kernel

HEADS_OF_PROGRAM = 2  # with 32 heads and one row 48 programs read the weights
ELEMENTS = 1024  # numbers of each gate per program of the activations
BLOCK = 2048  # of the hidden size, in registers at a time: 16 bytes per thread and load


@taped
@flat(Gates)
def gates_triton(gates: Gates) -> tuple[Tensor, Tensor, Tensor]:
    """log_decay, beta and alpha, float32 [B, 1, H], see `op_gates.gates_of_token`."""
    x, *weights = gates[:4]
    batch, (heads, hidden) = x.shape[0], weights[0].shape
    results = tuple(torch.empty(batch, 1, heads, dtype=torch.float32, device=x.device) for _ in range(3))
    gka_gates_kernel[(batch, cdiv(heads, HEADS_OF_PROGRAM), 3)](
        x, tuple(weights), tuple(gates[4:7]), gates.dt_bias.contiguous(), gates.A_log.contiguous(), results,
        heads, hidden, float(gates.beta_eps), BH=HEADS_OF_PROGRAM, BD=min(BLOCK, next_power_of_2(hidden)), num_warps=4,
    )  # fmt: skip
    return results


@taped
def activations_triton(
    z_decay: Tensor, z_beta: Tensor, z_alpha: Tensor, dt_bias: Tensor, A_log: Tensor, beta_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """log_decay, beta and alpha, float32 [B, T, H], see `op.gates_of_products`."""
    logits, size = tuple(t.contiguous() for t in (z_decay, z_beta, z_alpha)), z_decay.numel()
    results = tuple(torch.empty(z_decay.shape, dtype=torch.float32, device=z_decay.device) for _ in range(3))
    gka_activations_kernel[(cdiv(size, ELEMENTS),)](
        logits, dt_bias.contiguous(), A_log.contiguous(), results, size, z_decay.shape[-1], float(beta_eps),
        BLOCK=ELEMENTS, num_warps=4,
    )  # fmt: skip
    return results
