"""The gates of GKA's decode step: three small projections and their activations in one call.

    log_decay = -e^A_log softplus(W_0 x + dt_bias);  beta = sigmoid(W_1 x + b_1) + eps;  alpha = sigmoid(W_2 x + b_2)

Apart, they are four kernels per layer, each of which takes longer to start than to run. Here are the limits of the
choice between the paths, and the torch path; op_gates.py has the operator, launch_gates.py the kernel.
"""

from torch.nn import functional as F

from .._groups import flat
from ..rowwise.torch_path import decay_torch
from .arguments import Gates

MAX_NATIVE_WORK = 2**20  # products; with more of them, the matrix products of torch are faster
MAX_ROWS = 128  # of the Triton kernel, which reads the weights again for each row


@flat(Gates)
def gates_torch(gates: Gates):
    """log_decay, beta and alpha, as `op_gates.gates_of_token`."""
    x, *weights = gates[:4]
    logits = [F.linear(x, w, b).float() for w, b in zip(weights, gates[4:7], strict=True)]
    _, log_decay = decay_torch(logits[0], gates.dt_bias, gates.A_log, None, None, None)
    return log_decay, logits[1].sigmoid() + gates.beta_eps, logits[2].sigmoid()
