"""Lattice's Triton path measures the norms of its slots again, after every block of tokens and before the end.

The closed form of the norm drifts by rounding, and the rule multiplies a drift from token to token.
"""

import pytest
import torch
from checks import error
from lattice_rows import draw, draw_state
from ops_table import TOLERANCE, Shape

import hf_memmix_kernels as K

# a slot of eight float32 entries, just normalised, is this near to one; without that it is 1e-6 away after 16 tokens
NORMALISED = 3e-7


@pytest.mark.parametrize("variant", ["dec", "enc"])
def test_norms_after_many_steps(variant, monkeypatch):
    """Ten blocks at a step size that amplifies: outputs and final state of the float64 recurrence, norms of one."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    shape = Shape(1, 160, 1, 1, 4, 8)
    inputs, (state,) = draw(shape, torch.float32), draw_state(shape, 1, torch.float32)
    inputs["gamma"].fill_(0.5)
    want, want_state = K.naive_lattice(**inputs, variant=variant, initial_state=state)
    got, final = K.fused_recurrent_lattice(**inputs, variant=variant, initial_state=state)
    assert error(got, want) <= TOLERANCE[torch.float32]
    assert error(final, want_state) <= TOLERANCE[torch.float32]
    assert (torch.linalg.vector_norm(final.double(), dim=-2) - 1).abs().max() <= NORMALISED
