"""Equations of the papers that no experiment trains, each shown once in float64; and the presets' parameters."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_memmix import LatticeConfig
from hf_memmix.training.experiments.gka import equations
from hf_memmix_kernels import cg_lift
from hf_memmix_kernels.lattice.naive import naive_lattice, naive_write
from hf_memmix_kernels.ska.naive import naive_operator


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_filter_without_drift_is_the_ridge_regression():
    k, v, s = equations.sequences(1.0, [0])
    exact = equations.kalman(k, v, 1.0)
    torch.testing.assert_close(exact, equations.fading_ridge(k, v, 1.0, equations.NOISE), rtol=0, atol=1e-11)
    assert (s == s[:, :1]).all()
    drifting = equations.sequences(0.9, [0])
    (error,) = equations.errors(equations.kalman(*drifting[:2], 0.9), drifting[2])
    assert error < equations.errors(equations.fading_ridge(*drifting[:2], 0.9, 0.1), drifting[2])[0] < 1


@pytest.mark.parametrize("keep", [True, False])
def test_algorithm_2_is_the_gradient_of_algorithm_1(keep):
    """With the sign of equation 54; the one that is printed in equation 60 gives something else."""
    k, q, dx = randn(40, 8), randn(8, seed=1).requires_grad_(), randn(8, seed=2)
    H = k.mT @ k
    A = (H / torch.linalg.matrix_norm(H) + 0.02 * torch.eye(8, dtype=H.dtype)).requires_grad_()
    x, before, omegas = equations.chebyshev(A, q, 0.02, 1.02, 12)
    x.backward(dx)
    a, given = A.detach(), q.detach()
    last = (x.detach(), before.detach(), omegas if keep else [None] * 12 + omegas[-1:])
    dH, dq = equations.reversed_backward(a, given, 0.02, 1.02, last, dx)
    torch.testing.assert_close(dH, A.grad, rtol=0, atol=1e-9)
    torch.testing.assert_close(dq, q.grad, rtol=0, atol=1e-9)
    printed, _ = equations.reversed_backward(a, given, 0.02, 1.02, last, dx, sign=1)
    assert (printed - A.grad).norm() > 0.1 * A.grad.norm()


def test_small_sketches_and_small_alphas_answer_less():
    found = equations.answers(0.5, 96)["answers"]
    means = [sum(found[name]) for name in ("s = D", "s = D/2", "s = D/4", "alpha 0.5", "linear attention")]
    assert means == sorted(means, reverse=True) and len({*means}) == len(means)
    assert equations.answers(0.0, 2)["answers"]["s = D"] == [1.0] * len(equations.SEEDS)


def test_divisors_are_those_of_three_terms():
    """x_i - x_{i-1} - b (x_{i-1} - x_{i-2}) of conjugate gradients is a step along the residual for this b only."""
    k, q = randn(30, 6), randn(6, seed=1)
    A = k.mT @ k / 30 + 0.1 * torch.eye(6, dtype=k.dtype)
    iterates = [torch.zeros_like(q)]
    for size in range(1, 4):  # the minimum over the Krylov space of this size
        basis = torch.linalg.qr(torch.stack([torch.linalg.matrix_power(A, i) @ q for i in range(size)], 1))[0]
        iterates.append(basis @ torch.linalg.solve(basis.mT @ A @ basis, basis.mT @ q))
    for i, divisor in enumerate(equations.conjugate_divisors(A, q, 3), 2):
        rest = iterates[i] - iterates[i - 1] - divisor * (iterates[i - 1] - iterates[i - 2])
        residual = q - A @ iterates[i - 1]
        assert (rest @ residual).abs() / (rest.norm() * residual.norm()) == pytest.approx(1, abs=1e-9)


def test_l1_is_a_proximal_step_of_lattice():
    """Equation 18 minimises |S - S'|^2 / 2 + gamma lambda |S|_1, with S' the step without L1; so equation 17 falls."""
    S, k, v, gamma, lam = randn(6, 4), randn(4, 1, seed=1), randn(6, 1, seed=2), torch.tensor(1e-3).double(), 2.0
    plain, sparse = (naive_write(S, k, v, gamma, torch.ones(()), "dec", False, weight) for weight in (0.0, lam))

    def proximal(T):
        return (T - plain).square().sum() / 2 + gamma * lam * T.abs().sum()

    others = sparse + 1e-4 * randn(200, 6, 4, seed=3)
    assert all(proximal(sparse) < proximal(other) for other in others)

    def objective(T):  # equation 17
        return ((T / T.norm(dim=0)) @ k - v).square().sum() + lam * T.abs().sum()

    assert objective(sparse) < objective(S) and objective(sparse) < objective(plain)


def test_l1_makes_states_sparse():
    """The more so, the larger lambda is; 40 unit keys and values of 8 dimensions."""
    q, k, v = (F.normalize(randn(1, 40, 1, 8, seed=seed), dim=-1) for seed in range(3))
    states = [naive_lattice(q, k, v, 0.2 * torch.ones(1, 40, 1), l1=weight)[1] for weight in (0.0, 0.1, 0.3)]
    zeros = [(S == 0).double().mean().item() for S in states]
    assert zeros[0] == 0 < zeros[1] < zeros[2]


def rotated(x, phases):
    """Every pair of features of x [..., r] turned by a phase [..., r / 2]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(phases), phases)).flatten(-2)


def test_the_lift_of_pairs_cancels_phases():
    """Theorem .2 of Echo: invariants do not depend on the phase, harmonics turn by twice the phase (equation 32)."""
    x, phases = randn(50, 8), 7 * randn(50, 4, seed=1)
    plain, turned = cg_lift(x), cg_lift(rotated(x, phases))
    torch.testing.assert_close(turned[:, :4], plain[:, :4])
    real, imaginary = plain[:, 4:8], plain[:, 8:]
    cos, sin = (2 * phases).cos(), (2 * phases).sin()
    torch.testing.assert_close(turned[:, 4:8], cos * real - sin * imaginary)
    torch.testing.assert_close(turned[:, 8:], sin * real + cos * imaginary)


def test_random_phases_destroy_the_transition_operator_and_the_lift_restores_it():
    """Proposition .5: of keys that are equal but for random phases M is near 0, and M = G of their invariants."""
    keys = rotated(randn(1, 8).expand(4000, 8), 100 * randn(4000, 4, seed=1))
    ratios = []
    for z in (keys, cg_lift(keys)[:, :4]):
        G, M = z.mT @ z, z[1:].mT @ z[:-1]
        ratios.append((M.norm() / G.norm()).item())
    assert ratios[0] < 0.05 and ratios[1] == pytest.approx(1, abs=1e-3)


def test_freezing_nu_freezes_the_ridge():
    """The paper keeps nu of the prompt while it decodes; here nu goes on. Both differ by the ridge eps nu^2 only."""
    z, v, before, now, eps = (
        randn(60, 6),
        randn(60, 3, seed=1),
        torch.tensor(1.5).double(),
        torch.tensor(4.0).double(),
        1e-3,
    )
    statistics = z.mT @ z, z[1:].mT @ z[:-1], v.mT @ z
    frozen = naive_operator(*statistics, before, 2, eps, True, 1e-9)
    same = naive_operator(*statistics, now, 2, eps * (before / now).item() ** 2, True, 1e-9)
    torch.testing.assert_close(frozen, same, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(frozen, naive_operator(*statistics, now, 2, eps, True, 1e-9), rtol=1e-6)


def parameters(config) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def test_lattice_has_110m_parameters_pure_and_hybrid():
    """As the models of the paper's Table 2: the preset, its hybrids, and the transformer of its shape."""
    shape = {name: value for name, value in LatticeConfig.presets["110m"].items() if name != "mixers"}
    kept = {"pure": [], "one": [5], "a quarter": [2, 5, 8, 11], "half": [*range(1, 12, 2)]}
    counts = {name: parameters(LatticeConfig.preset("110m", attention_layers=[*of])) for name, of in kept.items()}
    counts |= {
        variant: parameters(LatticeConfig.preset("110m", mixers={"lattice": {"variant": variant}}))
        for variant in ("enc", "sim")
    }
    counts["transformer"] = parameters(LlamaConfig(**shape))
    assert {round(count / 1e6) for count in counts.values()} == {110}, counts
