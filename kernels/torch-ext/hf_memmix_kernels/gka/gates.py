"""The gates of GKA's decode step: three small projections and their activations in one call.

    log_decay = -e^A_log softplus(W_0 x + dt_bias);  beta = sigmoid(W_1 x + b_1) + eps;  alpha = sigmoid(W_2 x + b_2)

Apart, they are four kernels per layer, each of which takes longer to start than to run.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .._dispatch import native_library, use_triton
from .._registration import all_plain, needs_op
from ..rowwise.torch_path import decay_torch
from .native_path import gates_of_token_native

MAX_NATIVE_WORK = 2**20  # products; with more of them, the matrix products of torch are faster
MAX_ROWS = 128  # of the Triton kernel, which reads the weights again for each row


@torch.library.custom_op("hf_memmix::gka_gates", mutates_args=())
def _gates_op(
    x: Tensor,
    w_decay: Tensor,
    w_beta: Tensor,
    w_alpha: Tensor,
    b_decay: Tensor | None,
    b_beta: Tensor | None,
    b_alpha: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    beta_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    path = _gates_triton if use_triton(x, "gka", 1) else _gates_torch
    return path(x, w_decay, w_beta, w_alpha, b_decay, b_beta, b_alpha, dt_bias, A_log, beta_eps)


@_gates_op.register_fake
def _(x, w_decay, w_beta, w_alpha, b_decay, b_beta, b_alpha, dt_bias, A_log, beta_eps):
    shape = (x.shape[0], 1, w_decay.shape[0])
    return tuple(x.new_empty(shape, dtype=torch.float32) for _ in range(3))


def _gates_triton(*args) -> tuple[Tensor, Tensor, Tensor]:
    from .launch_gates import gates_triton

    return gates_triton(*args)


def _gates_torch(x, w_decay, w_beta, w_alpha, b_decay, b_beta, b_alpha, dt_bias, A_log, beta_eps):
    layers = ((w_decay, b_decay), (w_beta, b_beta), (w_alpha, b_alpha))
    logits = [F.linear(x, w, b).float() for w, b in layers]
    _, log_decay = decay_torch(logits[0], dt_bias, A_log, None, None, None)
    return log_decay, logits[1].sigmoid() + beta_eps, logits[2].sigmoid()


def _op_is_faster(x: Tensor) -> bool:
    """Whether a compiled program should call the op. On a CPU, torch.compile fuses the operators itself."""
    return x.is_cuda


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
    if through_op and not _op_is_faster(x):  # first: torch.compile would make a guard of every other condition
        return None
    # under autocast the layers have another dtype; native code and the kernel have no float64
    if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or dtype == torch.float64:
        return None
    if not all_plain(tensors):
        return None
    for t in (x, *weights, *biases):  # a loop takes half the time of any()
        if t is not None and (t.dtype != dtype or not t.is_contiguous()):
            return None
    arguments = (*weights, *biases, dt_bias, A_log, beta_eps)
    if through_op:
        return _gates_op(x, *arguments) if x.shape[0] <= MAX_ROWS else None
    if 3 * x.shape[0] * weights[0].numel() <= MAX_NATIVE_WORK and (library := native_library("gka", *tensors)):
        return gates_of_token_native(library, x, weights, biases, dt_bias, A_log, beta_eps)
    if x.shape[0] > MAX_ROWS or not use_triton(x, "gka", 1) or torch._C._are_functorch_transforms_active():
        return None
    return _gates_triton(x, *arguments)
