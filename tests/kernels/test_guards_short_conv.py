"""Short convolution over padded rows: the outputs at padded tokens give no gradient."""

import torch
from checks import error
from draw import DEVICE, randn

import hf_memmix_kernels as K

LENGTHS = (9, 0, 4)


def test_outputs_at_padding_give_no_gradient(backend):
    """The loss is a random weighted sum of all outputs, also at padding; the gradient of a sum of squares would be 0
    at the outputs 0 anyway.
    """
    tokens, channels = max(LENGTHS), 6
    x, weights = (randn(len(LENGTHS), tokens, channels, dtype=torch.float32) for _ in range(2))
    parameters = [randn(channels, 4, dtype=torch.float32), randn(channels, dtype=torch.float32)]
    leaves = [t.requires_grad_() for t in (x, *parameters)]
    lengths = torch.tensor(LENGTHS, device=DEVICE)
    for activation in ("silu", None):
        y, _ = K.short_conv(*leaves, activation=activation, lengths=lengths)
        got = torch.autograd.grad((y * weights).sum(), leaves)
        total = 0
        for row, length in enumerate(LENGTHS):
            if length:
                alone, _ = K.naive_short_conv(x[row : row + 1, :length], *parameters, activation=activation)
                total = total + (alone * weights[row : row + 1, :length]).sum()
        want = torch.autograd.grad(total, leaves)
        for name, a, b in zip(("x", "weight", "bias"), got, want, strict=True):
            assert error(a, b) <= 1e-5, (activation, name)
