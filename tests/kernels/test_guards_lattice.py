"""Lattice's Triton path normalises its slots by their computed norms after every block of tokens and at the end.

Between these points it uses the closed form of the norm, whose rounding errors grow from token to token.
"""

import pytest
import torch
from checks import error
from lattice_rows import draw, draw_state
from ops_table import TOLERANCE, Shape

import hf_memmix_kernels as K

# distance from 1 of the norm of a slot of eight float32 entries that was just normalised; without the normalisation
# the distance is 1e-6 after 16 tokens
NORMALISED = 3e-7


@pytest.mark.product_rows(r"dec")  # many tokens or iterations
@pytest.mark.parametrize("variant", ["dec", "enc"])
def test_norms_after_many_steps(variant, monkeypatch):
    """After ten blocks, at a step size that amplifies errors, outputs and final state equal the float64 recurrence and
    the norms are one.
    """
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    shape = Shape(1, 160, 1, 1, 4, 8)
    inputs, (state,) = draw(shape, torch.float32), draw_state(shape, 1, torch.float32)
    inputs["gamma"].fill_(0.5)
    want, want_state = K.naive_lattice(**inputs, variant=variant, initial_state=state)
    got, final = K.chunk_lattice(**inputs, variant=variant, initial_state=state)
    assert error(got, want) <= TOLERANCE[torch.float32]
    assert error(final, want_state) <= TOLERANCE[torch.float32]
    assert (torch.linalg.vector_norm(final.double(), dim=-2) - 1).abs().max() <= NORMALISED
