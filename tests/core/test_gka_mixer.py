"""What is GKA's own: the latent sketch, its states, and checkpoints with and without it."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.mixer_variants import made
from hf_memmix import RecurrentStateCache
from hf_memmix.serving.footprint import Footprint
from testing import assert_same, build, difference, mixers_of, random_ids, tiny_config


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


@torch.no_grad()
def test_a_sketch_of_the_head_size_changes_nothing():
    """An orthogonal S is a rotation of q and k, which the regression does not see."""
    (plain, x, rotary), (sketched, _, _) = (made("gka", {"sketch_dim": size}) for size in (None, 8))
    torch.nn.init.orthogonal_(sketched.sketch[0])
    torch.nn.init.orthogonal_(sketched.sketch[1])
    sketched.load_state_dict(plain.state_dict(), strict=False)
    tokens = plain.project(x, rotary)
    (want, _), (got, states) = plain.scan(tokens, None), sketched.scan(tokens, None)
    assert_same(got, want)
    one = {name: t[:, -1:] for name, t in tokens.items()}
    before = sketched.scan({name: t[:, :-1] for name, t in tokens.items()}, None)[1]
    assert_same(sketched.step(one, before), want[:, -1:], "a step")
    assert_same(before["U"], states["U"], "its state")


def loss_of(layer, x, rotary):
    """A random linear function of the outputs."""
    out = layer.readout(layer.scan(layer.project(x, rotary), None)[0], x)
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)).sum()


def gradients_of(phases, options):
    layer, x, rotary = made("gka", {**options, "solver_phases": phases})
    names, parameters = zip(*layer.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss_of(layer, x, rotary), parameters), strict=True))


CONVERGED = [40, 40, 40]
FORMS = pytest.mark.parametrize(
    "options", ({}, *({"sketch_dim": s} for s in (2, 4, 8)), {"use_alpha": False}, {"use_o_norm": False}), ids=str
)


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


def test_the_sketch_is_learned():
    layer, x, rotary = made("gka", {"sketch_dim": 4})
    y, _ = layer.scan(layer.project(x, rotary), None)
    (gradient,) = torch.autograd.grad((y * torch.randn_like(y)).sum(), layer.sketch)
    assert (gradient.abs().amax((1, 2)) > 0).all()


@torch.no_grad()
@pytest.mark.parametrize("layout", ("all", "odd"))
def test_generation_with_a_sketch(layout):
    """Token by token from the cache and without a cache: the same tokens."""
    model, ids = build(tiny_config("qwen3", layout, "gka", {"sketch_dim": 4}), dtype=torch.float64), random_ids(2, 9)
    cached, whole = (model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=used) for used in (True, False))
    assert cached.tolist() == whole.tolist()


@torch.no_grad()
def test_a_saved_cache_continues_and_another_sketch_refuses_it(tmp_path):
    def model_of(size):
        return build(tiny_config("llama", "all", "gka", {"sketch_dim": size}), dtype=torch.float64)

    model, ids = model_of(4), random_ids(1, 12)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    cache.save_pretrained(tmp_path)
    again = RecurrentStateCache.from_pretrained(tmp_path, model.config)
    got = model(ids[:, 8:], past_key_values=again).logits
    assert_same(got, model(ids).logits[:, 8:], "after loading")
    with pytest.raises(ValueError, match=r"mixers\.gka\.sketch_dim: cache 4, model None"):
        RecurrentStateCache.from_pretrained(tmp_path, model_of(None).config)


@torch.no_grad()
def test_checkpoints_with_and_without_the_option(tmp_path):
    """A sketched model loads as it was saved; a config.json from before the option is a model without a sketch."""
    ids = random_ids(1, 7)
    for size in (3, None):
        model = build(tiny_config("llama", "all", "gka", {"sketch_dim": size}))
        model.save_pretrained(tmp_path / str(size))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(size))
        assert again.config.mixers["gka"]["sketch_dim"] == size
        assert_same(again(ids).logits, model(ids).logits, str(size), tolerance=0)
    file = tmp_path / "None" / "config.json"
    fields = json.loads(file.read_text())
    del fields["mixers"]["gka"]["sketch_dim"]
    file.write_text(json.dumps(fields))
    old = AutoModelForCausalLM.from_pretrained(file.parent)
    assert not any("sketch" in name for name, _ in old.named_parameters())
    assert_same(old(ids).logits, model(ids).logits, "an old checkpoint", tolerance=0)


@pytest.mark.parametrize("size", (1, 4, 8))
def test_footprint_of_a_sketch(size):
    """Bytes per layer: [s, s] and [8, s] numbers in fp32 per query head, and the convolutions' states."""
    configs = [tiny_config("llama", (0,), "gka", {"sketch_dim": s}) for s in (size, None)]
    own, plain = (Footprint.of(config, torch.float32).state_bytes() for config in configs)
    assert plain - own == 4 * 4 * (2 * 64 - size * (size + 8))


@pytest.mark.parametrize(
    ("size", "match"),
    [
        (0, "sketch_dim=0 must be 1 to 256; at most the head size"),
        (-4, "sketch_dim=-4"),
        (2.5, "sketch_dim=2.5 must be of type"),
        ("half", "sketch_dim='half' must be of type"),
        (9, "layer 0: sketch_dim=9 is larger than the head size 8; set it to at most 8, or to None for no sketch"),
    ],
)
def test_wrong_sizes_are_refused_in_one_line(size, match):
    with pytest.raises(ValueError, match=match) as error:
        build(tiny_config("llama", (0,), "gka", {"sketch_dim": size}))
    assert "\n" not in str(error.value)


def test_the_size_is_part_of_what_a_model_is(tmp_path):
    """Unlike the solver's schedule, it cannot be changed at inference."""
    model = build(tiny_config("llama", "all", "gka", {"sketch_dim": 4}))
    with pytest.raises(ValueError, match="sketch_dim"):
        model.set_mixer_options("gka", sketch_dim=2)
    model.config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).mixers["gka"]["sketch_dim"] == 4
