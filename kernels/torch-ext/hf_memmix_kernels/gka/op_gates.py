"""The gates of GKA as ops of their own: of one token from the layer's input, of whole sequences from its products."""

import torch
from torch import Tensor

from .._dispatch import native_library, use_triton
from .._groups import flat
from .._registration import all_plain, needs_op, op_is_faster
from .arguments import Gates
from .gates import MAX_NATIVE_WORK, MAX_ROWS, gates_torch
from .native_path import gates_of_token_native


@torch.library.custom_op("hf_memmix::gka_gates", mutates_args=())
@flat(Gates)
def _gates_op(gates: Gates) -> tuple[Tensor, Tensor, Tensor]:
    path = _gates_triton if use_triton(gates.x, "gka", 1) else gates_torch
    return path(*gates)


@_gates_op.register_fake
def _(x, w_decay, *rest):
    shape = (x.shape[0], 1, w_decay.shape[0])
    return tuple(x.new_empty(shape, dtype=torch.float32) for _ in range(3))


def _gates_triton(*args) -> tuple[Tensor, Tensor, Tensor]:
    from .launch_gates import gates_triton

    return gates_triton(*args)


def gates_of_token(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    dt_bias: Tensor,
    A_log: Tensor,
    beta_eps: float,
) -> tuple[Tensor, ...] | None:
    """The gates of one token from the layer's input, in one call of native code or one kernel, without autograd.

    Arguments are not checked.

    Args:
        x: [B, 1, hidden].
        weights: three projections [H, hidden], and `biases` [H] or None: to the decay, to beta and to alpha.
        dt_bias, A_log: [H].
        beta_eps: added to beta.

    Returns:
        log_decay, beta and alpha, float32 [B, 1, H]; or None if neither native code nor the kernel can run, if
        gradients are needed, or if the matrix products of torch are faster.
    """
    tensors, dtype = (x, *weights, *biases, dt_bias, A_log), x.dtype
    through_op = needs_op(tensors)
    if through_op and not op_is_faster(x):  # first: torch.compile would make a guard of every other condition
        return None
    # under autocast the layers have another dtype; native code and the kernel have no float64
    if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or dtype == torch.float64:
        return None
    if not all_plain(tensors):
        return None
    for t in (x, *weights, *biases):  # a loop takes half the time of any()
        if t is not None and (t.dtype != dtype or not t.is_contiguous()):
            return None
    gates = Gates(x, *weights, *biases, dt_bias, A_log, beta_eps)
    if through_op:
        return _gates_op(*gates) if x.shape[0] <= MAX_ROWS else None
    if 3 * x.shape[0] * weights[0].numel() <= MAX_NATIVE_WORK and (library := native_library("gka", *tensors)):
        return gates_of_token_native(library, gates)
    if x.shape[0] > MAX_ROWS or not use_triton(x, "gka", 1) or torch._C._are_functorch_transforms_active():
        return None
    return _gates_triton(*gates)


def gates_of_products(
    z_decay: Tensor,
    z_beta: Tensor,
    z_alpha: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    beta_eps: float,
) -> tuple[Tensor, ...] | None:
    """The gates of whole sequences from the three projections, in one kernel, without autograd.

    Arguments are not checked.

    Args:
        z_decay, z_beta, z_alpha: the projections with their biases [B, T, H].
        dt_bias, A_log: [H].
        beta_eps: added to beta.

    Returns:
        log_decay, beta and alpha, float32 [B, T, H]; or None if the kernel cannot run or gradients are needed.
    """
    tensors = z_decay, z_beta, z_alpha, dt_bias, A_log
    if needs_op(tensors) or torch.is_grad_enabled() or z_decay.dtype == torch.float64 or not z_decay.numel():
        return None
    if not use_triton(z_decay, "gka", 1) or torch._C._are_functorch_transforms_active():
        return None
    from .launch_gates import activations_triton

    return activations_triton(*tensors, beta_eps)
