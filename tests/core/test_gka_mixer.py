"""What is GKA's own: the latent sketch, its states, and checkpoints with and without it."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.mixer_variants import made
from testing import assert_same, difference, mixers_of, tiny_config


def test_the_sketch_starts_orthonormal_and_differs_between_heads():
    torch.manual_seed(0)
    mixer = mixers_of(AutoModelForCausalLM.from_config(tiny_config("llama", (0,), "gka", {"sketch_dim": 5})))[0]
    sketch = mixer.sketch.detach()
    assert sketch.shape == (2, 8, 5) and "sketch" in dict(mixer.named_parameters())
    torch.testing.assert_close(sketch.mT @ sketch, torch.eye(5).expand(2, -1, -1))
    assert (sketch[0] - sketch[1]).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("use_o_norm", (True, False))
def test_the_layer_solves_the_projected_normal_equations(use_o_norm):
    """Appendix H word for word, with H and U of full size: project H and q, solve, project the solution back, read.

    (S^T H S + a |S^T H S| I) z = S^T q; y = D^-1/2 U S (S^T q + alpha (z - S^T q)), without an output norm unscaled.
    """
    options = {"sketch_dim": 3, "solver_phases": [100], "use_o_norm": use_o_norm, "use_rope": True}
    layer, x, rotary = made("gka", options)
    tokens = layer.project(x, rotary)
    y, states = layer.scan(tokens, None)
    q, k, v, log_decay, beta, _ = layer.memory_inputs(tokens, None, None, None)
    S = layer.sketch.repeat_interleave(2, 0)
    k, v = (t.repeat_interleave(2, 2) for t in (k, v))
    H = U = torch.zeros(3, 4, 8, 8, dtype=torch.float64)
    for t in range(x.shape[1]):
        decay, write = log_decay[:, t].exp()[..., None, None], beta[:, t].square()[..., None, None]
        H = decay * H + write * k[:, t, :, :, None] * k[:, t, :, None, :]
        U = decay * U + write * v[:, t, :, :, None] * k[:, t, :, None, :]
        small, right = S.mT @ H @ S, S.mT @ q[:, t, :, :, None]
        size = torch.linalg.matrix_norm(small)[..., None, None]
        z = torch.linalg.solve(small + layer.options.ridge * size * torch.eye(3), right)
        read = U @ (S @ (right + tokens["alpha"][:, t, :, None, None] * (z - right)))
        assert_same(y[:, t], read[..., 0] * (8**-0.5 if use_o_norm else 1), f"token {t}", tolerance=1e-8)
    assert_same(states["H"], small, "H")
    assert_same(states["U"], U @ S, "U")


def loss_of(layer, x, rotary):
    """A random linear function of the outputs."""
    out = layer.readout(layer.scan(layer.project(x, rotary), None)[0], x)
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)).sum()


def gradients_of(phases, options):
    layer, x, rotary = made("gka", {**options, "solver_phases": phases})
    names, parameters = zip(*layer.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss_of(layer, x, rotary), parameters), strict=True))


CONVERGED = [40, 40, 40]
SKETCHES = [{"sketch_dim": 4}, *(pytest.param({"sketch_dim": s}, marks=pytest.mark.product) for s in (2, 8))]
FORMS = pytest.mark.parametrize("options", ({}, *SKETCHES, {"use_alpha": False}, {"use_o_norm": False}), ids=str)


@FORMS
def test_the_gradient_of_a_converged_layer_is_that_of_finite_differences(options):
    layer, x, rotary = made("gka", {**options, "solver_phases": CONVERGED})
    found = gradients_of(CONVERGED, options)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in layer.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        direction /= torch.linalg.vector_norm(direction)
        start, step, values = parameter.detach().clone(), 1e-4, {}
        with torch.no_grad():
            for place in (-2, -1, 1, 2):
                parameter.copy_(start + place * step * direction)
                values[place] = loss_of(layer, x, rotary)
            parameter.copy_(start)
        slope = (8 * (values[1] - values[-1]) - (values[2] - values[-2])) / (12 * step)
        error = (slope - (found[name] * direction).sum()).abs()
        assert error <= 3e-8 * torch.linalg.vector_norm(found[name]), name


@pytest.mark.parametrize("iterations", (10, 20, 30, 40))
@FORMS
def test_the_residual_explains_the_error_of_the_gradient(options, iterations):
    """n iterations leave at most 1 / T_{n + 1}(1 + 2 a) of a right-hand side, a the ridge; a gradient is off by up to
    1 / a times as much, because a part of k's is the difference of two sums that are so much larger.
    """
    ridge = made("gka", options)[0].options.ridge
    residual = 1 / math.cosh((iterations + 1) * math.acosh(1 + 2 * ridge))
    exact, found = gradients_of(CONVERGED, options), gradients_of([iterations], options)
    errors = {name: difference(found[name], exact[name]) for name in exact}
    assert all(error <= residual / ridge for error in errors.values()), errors
    assert max(errors.values()) > 0.05 * residual / ridge, "the bound is far from what it bounds"


@torch.no_grad()
@pytest.mark.parametrize("backend", ("torch", "native"))
@pytest.mark.parametrize("tokens", (1, 5))
@pytest.mark.parametrize("without", ({}, {"use_decay": False}, {"use_alpha": False}, {"use_beta": False}), ids=str)
def test_every_path_to_the_gates_gives_their_formulas(without, tokens, backend, monkeypatch):
    """A write strength is never zero: 1e-6 is added, as in the release."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", backend)
    layer, x, rotary = made("gka", without)
    layer, x, rotary = layer.float(), x.float()[:, :tokens].contiguous(), tuple(t.float()[:, :tokens] for t in rotary)
    if layer.options.use_beta:
        layer.b_proj.bias[:2] = -40
    found = layer.project(x, rotary)
    if layer.options.use_decay:
        step = torch.nn.functional.softplus(layer.a_proj(x) + layer.dt_bias)
        torch.testing.assert_close(found["log_decay"], -layer.A_log.exp() * step)
    assert bool(found["log_decay"].any()) == layer.options.use_decay
    for used, name, proj in (("use_beta", "beta", "b_proj"), ("use_alpha", "alpha", "alpha_proj")):
        assert (name in found) == getattr(layer.options, used)
        if name in found:
            eps = 1e-6 if name == "beta" else 0
            torch.testing.assert_close(found[name], getattr(layer, proj)(x).sigmoid() + eps, rtol=1e-5, atol=1e-12)
