"""Norms of Lattice's slots on its Triton path.

They are measured after every block of tokens and at the end. In between, a closed form gives them, whose rounding
errors grow from token to token.
"""

import pytest
import torch
from checks import error
from draw import DEVICE
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


@pytest.mark.parametrize("variant", ["dec", "enc", "sim"])
def test_large_steps_along_a_slot(variant, monkeypatch):
    """v lies along all slots, so |h|^2 - p^2 is zero but for rounding, which may be negative and is multiplied by the
    square of the step. In the first row 1 + 3e8 loses the 1, and the slots become zero.
    """
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    slot = torch.nn.functional.normalize(torch.randn(8, 1, 1, 5, device=DEVICE), dim=-1)
    slot[0] = torch.eye(5)[0]
    q = k = torch.ones(8, 1, 1, 4, device=DEVICE)
    gamma = torch.full((8, 1, 1), 1e6, device=DEVICE)
    gamma[0] = 1e8
    v = (7 if variant == "dec" else 3) * slot  # in "dec" h = S k - v
    leaves = [x.clone().requires_grad_() for x in (q, k, v, gamma, slot.mT.expand(8, 1, 5, 4))]
    o, final = K.chunk_lattice(*leaves[:4], variant=variant, initial_state=leaves[4])
    grads = torch.autograd.grad(o.sum() + final.sum(), leaves)
    state = leaves[4].detach().clone()
    y = K.lattice_step(*(x.detach() for x in leaves[:4]), variant=variant, state=state)
    assert all(x.isfinite().all() for x in (o, final, *grads, y, state))
    assert not final[0].any() and not state[0].any()
