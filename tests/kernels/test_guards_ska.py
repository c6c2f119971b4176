"""SKA in special cases: several keys have the largest norm or none has a norm, and rounding makes a pivot zero or a
square negative.
"""

import pytest
import torch
from checks import error
from draw import DEVICE
from ops_table import TOLERANCE, Shape
from ska_rows import draw

import hf_memmix_kernels as K
from hf_memmix_kernels.ska.naive import SMALLEST_NORM
from hf_memmix_kernels.ska.operator import inverse, spectral_scale

CHUNK = 80
SHAPE = Shape(1, 170, 1, 1, 8, 6)
# positions of two keys that both have the largest norm: in one block of 64 tokens, in two blocks of a chunk, and in
# two chunks
TIES = {"block": (3, 9), "blocks": (3, 70), "chunks": (3, 117)}


@pytest.mark.product_rows(r"triton")  # variants of an op
@pytest.mark.parametrize("places", TIES.values(), ids=TIES)
def test_ties_share_the_gradient_of_the_norm(places, backend):
    """If both keys are scaled, nu is scaled. So the sum of both gradients does not depend on how the gradient of nu is
    divided between them.
    """
    inputs = draw(SHAPE, torch.float32)
    inputs["k"] *= 0.25
    signs = torch.tensor([1.0, 1, 1, 1, 1, -1, 1, 1], device=DEVICE)
    # with entries of 1/2 the norm is a power of two times sqrt(2), and the sum is exact in any order
    for place, sign in zip(places, (torch.ones_like(signs), signs), strict=True):
        inputs["k"][0, place, 0] = 0.5 * sign
    weights = torch.randn(1, SHAPE.T, 1, SHAPE.Dv, dtype=torch.float64, device=DEVICE)
    shares = {}
    for fn in (K.naive_ska, K.chunk_ska):
        leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
        o, final = fn(**leaves, chunk_size=CHUNK, eps=0.05, power=1)
        loss = (o.double() * weights).sum() + 3 * final[3].double().sum()
        grad = torch.autograd.grad(loss, leaves["k"])[0].double()
        shares[fn] = sum((grad[0, place, 0] * inputs["k"][0, place, 0].double()).sum() for place in places)
    # nu is 3 sqrt(2) in the loss, so a missing or doubled share changes the result by more than one
    assert abs(shares[K.chunk_ska] - shares[K.naive_ska]) <= 1e-3


def test_a_norm_below_the_smallest_gets_no_gradient(backend):
    """The ridge no longer depends on it."""
    inputs, grads = draw(Shape(1, 10, 1, 1, 4, 3), torch.float32), []
    inputs["k"] *= SMALLEST_NORM
    for fn in (K.naive_ska, K.chunk_ska):
        leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
        o, _ = fn(**leaves, chunk_size=4, eps=0.05)
        grads.append(torch.autograd.grad(o.double().square().sum(), leaves["k"])[0])
    assert error(grads[1], grads[0]) <= 2 * TOLERANCE[torch.float32]


@pytest.mark.parametrize(("below", "times"), [(0.5, 1), (5, 10), (50, 100), (500, 1000)])
def test_the_ridge_grows_until_the_statistics_are_positive_definite(below, times):
    """Ten times as large, up to three times; `below`: by how many ridges an eigenvalue is negative."""
    sound, ridge = torch.eye(3, dtype=torch.float64), torch.tensor([0.01, 0.01], dtype=torch.float64)
    G = torch.stack([sound, sound - torch.diag(torch.tensor([0, 0, 1 + below * 0.01], dtype=torch.float64))])
    regular, P = inverse(G, ridge, check=True)
    torch.testing.assert_close(regular[0], sound * 1.01)
    torch.testing.assert_close(regular[1], G[1] + times * 0.01 * sound)
    torch.testing.assert_close(P @ regular, sound.expand(2, 3, 3))
    G[1, 2, 2] -= 10
    with pytest.raises(ValueError, match="sequence 1, .* not positive definite, even with a ridge 1000 times"):
        inverse(G[:, None], ridge[:, None], check=True)


@pytest.mark.product_rows(r"(.*-0\]|[23] equal)")  # variants of an op
@pytest.mark.parametrize("power", [0, 2])
@pytest.mark.parametrize("equal", [2, 3, 4], ids=lambda n: f"{n} equal features")
def test_pivots_lost_by_rounding(equal, power, monkeypatch):
    """Keys in one direction and a ridge below float32's rounding of their sums: outputs and gradients stay finite.

    In exact arithmetic the second pivot of the inverse is the ridge; in float32 it is zero.
    """
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    k = torch.zeros(1, 96, 1, 8, device=DEVICE)
    k[..., :equal] = 1
    k[:, 1::2] *= -1
    v = k[..., :1] * torch.arange(1.0, 6.0, device=DEVICE)
    leaves = [t.clone().requires_grad_() for t in (k, k, v)]
    o, final = K.chunk_ska(*leaves, chunk_size=32, eps=1e-8, power=power, spectral_norm=power > 0)
    grads = torch.autograd.grad(o.mean() + sum(s.mean() for s in final), leaves)
    assert all(torch.isfinite(t).all() for t in (o, *final, *grads))


def test_a_square_of_sigma_that_rounding_makes_negative_counts_as_zero(backend):
    """The sums of many keys in few directions lose the ridge, so the numerator or the denominator is negative."""
    eye = torch.eye(2, device=DEVICE)
    Gt, MT = torch.tensor([[1.0, 0], [0, -9]], device=DEVICE), torch.tensor([[0.0, 0], [1, 0]], device=DEVICE)
    assert float(spectral_scale(Gt, eye, MT, MT, 2, 0.1)) == pytest.approx(100)
    statistics = torch.cat([-2e-3 * eye, eye, eye], 1)  # the denominator adds a ridge of 1e-3
    state = tuple(t[None, None].contiguous() for t in (statistics, eye, 0 * eye[0], eye[0, 0], eye[0, 1]))
    q, k = torch.tensor([0.5, -2.0], device=DEVICE).view(1, 1, 1, 2), torch.zeros(1, 1, 1, 2, device=DEVICE)
    o = K.ska_step(q, k, k, None, None, None, state=state, eps=1e-3, sigma_floor=0.1, refresh_every=1)
    torch.testing.assert_close(o, 100 * q)
