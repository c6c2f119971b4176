"""Short convolution over padded rows: the outputs at padded tokens give no gradient."""

import pytest
import torch
from checks import error
from draw import DEVICE, randn

import hf_memmix_kernels as K
from hf_memmix_kernels._chunks import chunk_table, keep_tables

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


def test_some_channels_of_a_larger_tensor_and_its_steps(backend):
    """A part of the channels is read where it lies: in batches, in packed rows, and in a step."""
    batch, tokens, channels = 2, 7, 6
    wide = randn(batch, tokens, channels + 10, dtype=torch.float32)
    part, parameters = wide[..., 3 : 3 + channels], (randn(channels, 4, dtype=torch.float32), None)
    packed, bounds = wide.view(1, -1, channels + 10)[..., 3 : 3 + channels], torch.tensor([0, 5, 14], device=DEVICE)
    state = randn(batch, channels, 3, dtype=torch.float32)
    every_other = wide[:, ::2]  # the tokens of a row, but not those of the batch, lie at equal distances
    calls = {
        "batch": lambda x: K.short_conv(x, *parameters, initial_state=state),
        "packed": lambda x: K.short_conv(x, *parameters, cu_seqlens=bounds),
        "step": lambda x: (K.short_conv_step(x, *parameters, after := state.clone()), after),
    }
    inputs = [("batch", part), ("packed", packed), ("batch", every_other[..., :channels])]
    inputs += [("step", part[:, :1]), ("step", part[:1, 2:3].expand(batch, -1, -1))]
    inputs.append(("batch", randn(batch, channels, 1, dtype=torch.float32).mT))  # contiguous: one token has any stride
    for name, x in inputs:
        dense = x.clone(memory_format=torch.contiguous_format)
        assert x.stride() != dense.stride()
        for got, want in zip(calls[name](x), calls[name](dense), strict=True):
            assert got.is_contiguous() and torch.equal(got, want), name


def test_no_rows(backend):
    x, weight = (randn(*size, dtype=torch.float32).requires_grad_() for size in ((0, 5, 6), (6, 4)))
    y, final = K.short_conv(x, weight)
    dx, dweight = torch.autograd.grad(y.sum() + final.sum(), (x, weight))
    assert y.shape == dx.shape == x.shape and final.shape == (0, 6, 3) and not dweight.any()


def test_kept_tables_are_computed_once():
    """Only for boundaries whose owner has asked for it: others may change."""
    bounds = torch.tensor([0, 5, 14], dtype=torch.int32, device=DEVICE)
    before = chunk_table(bounds, 14, 4)
    assert chunk_table(bounds, 14, 4)[0] is not before[0]
    keep_tables(bounds)
    first = chunk_table(bounds, 14, 4)
    assert chunk_table(bounds, 14, 4)[0] is first[0] and chunk_table(bounds.to(torch.int32), 14, 4)[1] is first[1]
    assert all(torch.equal(a, b) for a, b in zip(before[:2], first[:2], strict=True)) and before[2] == first[2]
    assert chunk_table(bounds, 14, 2)[2] == 14 // 2 + 2


@pytest.mark.product_rows(r"triton-packed")  # one row per kernel stays in the interpreter
@pytest.mark.parametrize("cu_seqlens", [None, [0, 2, 9, 21]], ids=["batched", "packed"])
def test_inputs_are_clamped_and_may_be_a_slice_as_in_steps(cu_seqlens, backend, poisoned_empty):
    """As in Mamba-2: x is a part of a fused projection. A step gives the same as the whole, also in its state."""
    wide = randn(1, 21, 20, dtype=torch.float32)
    x, weight, bias = wide[..., 4:16], randn(12, 4, dtype=torch.float32), randn(12, dtype=torch.float32)
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, device=DEVICE)
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    state = 0.5 * randn(sequences, 12, 3, dtype=torch.float32)
    leaves = [t.detach().requires_grad_() for t in (wide, weight, bias, state)]
    weights = randn(1, 21, 12, dtype=torch.float32), randn(sequences, 12, 3, dtype=torch.float32)
    results = []
    for fn in (K.short_conv, K.naive_short_conv):
        x, *parameters, start = leaves[0][..., 4:16], *leaves[1:]
        y, final = fn(x, *parameters, limit=0.8, initial_state=start, cu_seqlens=bounds)
        loss = (y * weights[0]).sum() + (final * weights[1]).sum()
        results.append([y, final, *torch.autograd.grad(loss, leaves)])
    for got, want in zip(*results, strict=True):
        assert error(got, want) <= 1e-5
    if cu_seqlens is None:
        with torch.no_grad():
            state, (y, final, *_) = state.clone(), results[1]
            steps = [K.short_conv_step(t, weight, bias, state, limit=0.8) for t in wide[..., 4:16].split(1, 1)]
        assert error(torch.cat(steps, 1), y) <= 1e-5 and error(state, final) <= 1e-5
