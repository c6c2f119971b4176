"""SKA beyond the contract tests: the paper's propositions, its modes, padding, bad statistics and extreme inputs."""

import pytest
import torch
from checks import assert_close, error, outputs_and_gradients
from draw import DEVICE, rand, randn
from ops_table import OPS, Shape
from paths import PATHS, parametrize
from ska_rows import POSITION, draw_state
from ska_rows import draw as draw_tokens

import hf_memmix_kernels as K
from hf_memmix_kernels.ska.arguments import Estimate
from hf_memmix_kernels.ska.naive import naive_cholesky, naive_operator, naive_spectral_norm
from hf_memmix_kernels.ska.operator import Operator

SKA = next(op for op in OPS if op.name == "ska")
F64 = torch.float64
SHAPE = Shape(2, 40, 4, 2, 8, 6)


def draw(shape: Shape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs with a factor gamma per head and one eta for all heads."""
    factors = {"gamma": 0.5 + rand(shape.H, dtype=dtype), "eta": 1 + rand(1, dtype=dtype)[0]}
    return draw_tokens(shape, dtype) | factors


def statistics(r: int, P: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """(keys, values, G, M, C) of random tokens in float64."""
    k, v = randn(tokens, r, dtype=F64), randn(tokens, P, dtype=F64)
    return k, v, k.mT @ k, k[1:].mT @ k[:-1], v.mT @ k


def power_rows() -> list[tuple]:
    """In the interpreter three of them: the contract's row has power 2."""
    rows = [(power, norm, path) for path in PATHS for norm in ("raw", "normalised") for power in range(5)]
    few = ((0, "normalised"), (1, "raw"), (4, "normalised"))
    rows = [row for row in rows if row[2] != "triton" or DEVICE == "cuda" or row[:2] in few]
    return [(*row, row[2] == "torch" and row[1] == "normalised") for row in rows]


@parametrize(("power", "norm", "backend"), power_rows())
def test_every_power(power, norm, backend):
    spectral_norm = norm == "normalised"
    options = {"power": power, "spectral_norm": spectral_norm, "chunk_size": 12, "eps": 0.05}
    dtype = F64 if backend == "torch" else torch.float32
    shape = SHAPE._replace(B=1, T=26)
    inputs, state = draw(shape, dtype), draw_state(shape, 1, dtype)
    o, final = K.naive_ska(**inputs, **options, initial_state=state)
    # with o as the weights of o, no terms cancel in the gradients of the factors
    weights = [o, *(randn(*s.shape, dtype=F64) for s in final)]
    if power == 0:
        inputs.pop("gamma")  # its power is 1

    def run(fn):
        return outputs_and_gradients(SKA, lambda **x: fn(**x | options), inputs, state, weights=weights)

    want, got = run(K.naive_ska), run(K.chunk_ska)
    # sigma is at least 0.1, so the filter multiplies rounding errors by at most 10 to the power K
    assert_close(got, want, lambda name: (1e-10 if dtype == F64 else 1e-4) * (10 if power > 2 else 1))


def test_power_zero_is_ridge_regression():
    """Corollary .9: without the power filter W minimises |V - W Z|^2 + eps |W|^2, in normalised keys Z."""
    k, v, G, M, C = statistics(6, 5, 40)
    nu = k.norm(dim=-1).max()
    W = naive_operator(G, M, C, nu, 0, 0.1, True, 0.1).requires_grad_()
    z = k / nu
    loss = (v - z @ (W * nu).mT).square().sum() + 0.1 * (W * nu).square().sum()
    (gradient,) = torch.autograd.grad(loss, W)
    assert gradient.abs().max() <= 1e-9 * nu * C.abs().max()


@pytest.mark.parametrize("tokens", [2, 9, 200])
def test_whitened_and_unwhitened_operators_agree(tokens):
    """Proposition .4: C L^-T (L^-1 M L^-T)^K L^-1 = C P (M P)^K, and their norms."""
    k, _, G, M, C = statistics(8, 5, tokens)
    nu = k.norm(dim=-1).max()
    S = torch.cat([G, M.mT, C.mT], -1)
    for power in range(5):
        want = naive_operator(G, M, C, nu, power, 1e-2, True, 0.1)
        got = Operator(S[None, None], nu[None, None], Estimate(power, 1e-2, True, 0.1), True).WT[0, 0].mT
        assert error(got, want) <= 1e-10


def test_whitened_operator_never_expands():
    """|A_w|_2 <= 1: the lagged pairs are rows of two Gram matrices that G bounds; the power iteration stays below."""
    for tokens in (2, 5, 20, 500):
        for _ in range(20):
            _, _, G, M, _ = statistics(6, 1, tokens)
            L = naive_cholesky(G, 1e-6)
            A = torch.linalg.solve_triangular(L, torch.linalg.solve_triangular(L, M, upper=False).mT, upper=False).mT
            true = torch.linalg.matrix_norm(A, 2)
            estimate = naive_spectral_norm(A, L)
            assert true <= 1 + 1e-9
            assert 0.8 * true <= estimate <= true * (1 + 1e-9)


@pytest.mark.product_rows(r"triton")  # one row per kernel stays in the interpreter
def test_nu_cancels(backend):
    """If keys and queries are scaled, the output is the same, because the ridge is in units of nu^2."""
    inputs = draw(SHAPE._replace(B=1), torch.float32)
    options = {"chunk_size": 12, "eps": 0.05}
    o, _ = K.chunk_ska(**inputs, **options)
    for scale in (2.0**-10, 2.0**15):
        scaled = {name: t * scale if name in "qk" else t for name, t in inputs.items()}
        assert error(K.chunk_ska(**scaled, **options)[0], o) <= 1e-5


def test_memory_crossover():
    """Proposition .14: less memory than a key-value cache from (2 r^2 + r P + r + 1) / (r + P) tokens on."""
    r, P = 32, 64
    statistics, operator, previous, nu, _ = K.ska_state_shapes(1, 1, r, P)
    count = sum(torch.Size(shape).numel() for shape in (statistics, previous, nu))
    assert count == 2 * r * r + r * P + r + 1
    tokens = next(n for n in range(1, 1000) if n * (r + P) > count)
    assert tokens == count // (r + P) + 1 == 44
    assert torch.Size(operator).numel() == r * P  # kept between two refreshes


def test_two_kinds_of_ends_are_refused():
    inputs = draw(SHAPE._replace(B=1), F64)
    ends, bounds = torch.tensor([3], device=DEVICE), torch.tensor([0, 2, SHAPE.T], device=DEVICE)
    for where in ({"lengths": ends, "cu_seqlens": bounds}, {"lengths": ends.repeat(2)}):
        with pytest.raises(ValueError, match="lengths"):
            K.chunk_ska(**inputs, **where)


@pytest.mark.product_rows(r"triton")  # one row per kernel stays in the interpreter
@pytest.mark.parametrize("normalization", ["running_max", "sequence_max"])
def test_action_mask(normalization, backend):
    """A token outside the mask reads but is not stored and is not a neighbour of other tokens; its key gets no
    gradient.
    """
    dtype = F64 if backend == "torch" else torch.float32
    shape = SHAPE._replace(B=1)
    inputs = {name: t.requires_grad_() for name, t in draw(shape, dtype).items()}
    mask = torch.rand(1, shape.T, device=DEVICE) < 0.6
    options = {"chunk_size": 12, "eps": 0.05, "normalization": normalization}
    want, want_state = K.naive_ska(**inputs, mask=mask, **options)
    got, state = K.chunk_ska(**inputs, mask=mask, **options)
    assert error(got, want) <= SKA.tolerance(dtype)
    assert all(error(a, b) <= SKA.tolerance(dtype) for a, b in zip(state, want_state, strict=True))
    (grad,) = torch.autograd.grad(got.square().sum(), inputs["k"])
    assert not grad[~mask].any()
    soft, _ = K.chunk_ska(**inputs, mask=mask.to(dtype), **options)
    assert error(soft, got) <= 1e-6


@pytest.mark.product_rows(r"triton")  # one row per kernel stays in the interpreter
def test_sequence_max_ignores_pads(backend):
    """The largest key norm of a row is that of a token, even if padded keys are larger."""
    inputs, lengths = draw(SHAPE, torch.float32), torch.tensor([SHAPE.T, 9], device=DEVICE)
    inputs["k"][1, 9:] *= 100
    options = {"normalization": "sequence_max", "chunk_size": 4, "eps": 0.1}
    o, final = K.chunk_ska(**inputs, **options, lengths=lengths)
    alone = {name: t[1:, :9] if name in "qkv" else t for name, t in inputs.items()}
    want, want_final = K.naive_ska(**alone, **options)
    assert error(o[1:, :9], want) <= SKA.tolerance(torch.float32)
    assert all(error(s[1:], w) <= SKA.tolerance(torch.float32) for s, w in zip(final, want_final, strict=True))


@pytest.mark.product_rows(r"triton")  # one row per kernel stays in the interpreter
def test_padding_by_lengths(backend):
    """Right-padded rows equal the rows without padding for any values at the padding, whose gradient is zero."""
    shape = SHAPE._replace(B=3)
    inputs, state = draw(shape, torch.float32), draw_state(shape, 3, torch.float32)
    lengths = torch.tensor([SHAPE.T, 0, 7], device=DEVICE)
    padded = torch.arange(SHAPE.T, device=DEVICE) >= lengths[:, None]
    leaves = {
        name: (t.masked_fill(padded[..., None, None], float("nan")) if name in "qkv" else t).requires_grad_()
        for name, t in inputs.items()
    }
    o, final = SKA.run(lambda **x: K.chunk_ska(**x, lengths=lengths), leaves, state)
    loss = o.square().sum() + sum(s.square().sum() for s in final)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert not o[padded].any()
    for b, length in enumerate(lengths.tolist()):
        own = tuple(s[b : b + 1] for s in state)
        if not length:
            assert all(torch.equal(s[b : b + 1], start) for s, start in zip(final, own, strict=True))
            continue
        alone = {name: t[b : b + 1, :length] if name in "qkv" else t for name, t in inputs.items()}
        want, want_final = SKA.run(K.naive_ska, alone, own)
        assert error(o[b : b + 1, :length], want) <= SKA.tolerance(torch.float32)
        assert all(
            error(s[b : b + 1], w) <= SKA.tolerance(torch.float32) for s, w in zip(final, want_final, strict=True)
        )
    for name in "qkv":
        assert torch.isfinite(grads[name]).all() and not grads[name][padded].any(), name


@pytest.mark.product_rows(r"triton")  # one row per kernel stays in the interpreter
def test_step_at_every_token(backend):
    """refresh_every=1 gives the results of chunks of one token, for every number of tokens between two inversions."""
    dtype = F64 if backend == "torch" else torch.float32
    shape = SHAPE._replace(T=12)
    inputs, state = draw(shape, dtype), draw_state(shape, 2, dtype)
    mine = K.ska_per_token_state(state, eps=0.05)
    operator = Operator(state[0], state[3], Estimate(2, 0.05, True, 0.1), True).WT
    whole = (state[0], operator, *state[2:4], torch.zeros_like(state[4]))
    want, final = K.naive_ska(**inputs, chunk_size=1, eps=0.05, initial_state=whole)
    outputs = []
    for t in range(shape.T):
        one = {name: t_[:, t : t + 1] for name, t_ in inputs.items() if name in "qkv"}
        outputs.append(
            K.ska_step(
                **one, mask=None, gamma=inputs["gamma"], eta=inputs["eta"], state=mine, eps=0.05, chunk_size=5,
                refresh_every=1,
            )
        )  # fmt: skip
    assert error(torch.cat(outputs, 1), want) <= SKA.tolerance(dtype)
    assert all(error(mine[i], final[i]) <= SKA.tolerance(dtype) for i in (0, 2, 3))


@pytest.mark.product_rows(r"triton-(?!zero)")  # one row per kernel stays in the interpreter
@pytest.mark.product_rows(r"torch-(constant|huge|tiny)")  # variants of an op
@pytest.mark.parametrize("case", ["zero", "constant", "one direction", "huge", "tiny", "growing"])
def test_extreme_inputs_stay_finite(case, backend):
    """Outputs, states and gradients are finite at the paper's ridge."""
    shape = SHAPE._replace(B=1, T=20, H=2, Hk=1)
    inputs = draw(shape, torch.float32)
    steps = torch.arange(shape.T, device=DEVICE)[:, None, None]
    change = {
        "zero": torch.zeros_like,
        "constant": torch.ones_like,
        "one direction": lambda t: t[:, :1].expand_as(t) * (-1.0) ** steps,
        "huge": lambda t: t * 1e12,
        "tiny": lambda t: t * 1e-12,
        "growing": lambda t: t * 10.0 ** (steps // 4),
    }[case]
    leaves = {name: (change(t) if name in "qkv" else t).clone().requires_grad_() for name, t in inputs.items()}
    o, final = K.chunk_ska(**leaves, chunk_size=8)
    grads = torch.autograd.grad(o.mean() + sum(s.mean() for s in final), list(leaves.values()))
    assert all(torch.isfinite(t).all() for t in (o, *final, *grads))
    state = tuple(s.detach().clone() for s in final)
    one = {name: leaves[name].detach()[:, :1] for name in "qkv"}
    per_token = K.ska_per_token_state(state)
    for _ in range(9):
        for s, every in ((state, None), (per_token, 1)):
            y = K.ska_step(**one, mask=None, gamma=None, eta=None, state=s, chunk_size=8, refresh_every=every)
            assert torch.isfinite(y).all() and all(torch.isfinite(t).all() for t in s)


def test_statistics_that_are_not_a_gram_matrix():
    inputs, state = draw(SHAPE, torch.float32), draw_state(SHAPE, 2, torch.float32)
    K.check_ska_state(state, 16)
    bad = state[0].clone()
    bad[1, 0, :, :8] = -bad[1, 0, :, :8]
    with pytest.raises(ValueError, match="sequence 1, head 0 is not positive semidefinite"):
        K.check_ska_state((bad, *state[1:]))
    skewed = state[0].clone()
    skewed[0, 1, 0, 1] += 5
    with pytest.raises(ValueError, match="sequence 0, head 1 is not symmetric"):
        K.check_ska_state((skewed, *state[1:]))
    with pytest.raises(ValueError, match="not finite"):
        K.check_ska_state((state[0] / 0, *state[1:]))
    with pytest.raises(ValueError, match=f"{POSITION} tokens into a chunk, chunk_size=8 has fewer"):
        K.check_ska_state(state, 8)
    arguments = {name: t.cpu() for name, t in inputs.items()}
    arguments["initial_state"] = tuple(s.cpu() for s in (bad, *state[1:]))
    for fn in (K.naive_ska, K.chunk_ska):
        with pytest.raises(ValueError, match="not positive definite"):
            fn(**arguments, chunk_size=16)


def test_step_refuses_what_does_not_fit():
    inputs, state = draw(SHAPE, torch.float32), draw_state(SHAPE, 2, torch.float32)
    one = {name: inputs[name][:, :1] for name in "qkv"} | dict.fromkeys(("mask", "gamma", "eta"))
    with pytest.raises(ValueError, match="refresh_every=3"):
        K.ska_step(**one, state=state, refresh_every=3)
    with pytest.raises(ValueError, match="state"):
        K.ska_step(**one, state=state, refresh_every=1)
    with pytest.raises(ValueError, match="contiguous"):
        K.ska_step(**one, state=(state[0].mT.contiguous().mT, *state[1:]))
    with pytest.raises(ValueError, match="rank"):
        K.chunk_ska(*(torch.zeros(1, 2, 1, 200, device=DEVICE) for _ in range(3)))


def test_cg_lift_ignores_rotations():
    """Theorem .2: a rotation of the pairs does not change the first third, and rotates the rest by twice its angle."""
    x = randn(5, 8, dtype=F64)
    angle = randn(5, 4, dtype=F64)
    w = torch.view_as_complex(x.view(5, 4, 2))
    turned = K.cg_lift(torch.view_as_real(w * torch.polar(torch.ones_like(angle), angle)).flatten(1))
    lifted = K.cg_lift(x)
    assert lifted.shape == (5, 12)
    assert error(turned[:, :4], lifted[:, :4]) <= 1e-12
    harmonic, after = (torch.complex(t[:, 4:8], t[:, 8:]) for t in (lifted, turned))
    assert (harmonic * torch.polar(torch.ones_like(angle), 2 * angle) - after).abs().max() <= 1e-12
    with pytest.raises(ValueError, match="even"):
        K.cg_lift(x[:, :3])


def test_cg_lift_restores_the_transition_operator():
    """Proposition .5: of keys that are equal but for random phases M is near 0, and M = G of their invariants."""
    w = torch.view_as_complex(randn(1, 4, 2, dtype=F64)).expand(4000, 4)
    angle = 100 * randn(4000, 4, dtype=F64)
    keys, ratios = torch.view_as_real(w * torch.polar(torch.ones_like(angle), angle)).flatten(1), []
    for z in (keys, K.cg_lift(keys)[:, :4]):
        ratios.append(((z[1:].mT @ z[:-1]).norm() / (z.mT @ z).norm()).item())
    assert ratios[0] < 0.05 and ratios[1] == pytest.approx(1, abs=1e-3)


def test_freezing_nu_freezes_the_ridge():
    """The paper keeps nu of the prompt while it decodes; here nu goes on. Both differ by the ridge eps nu^2 only."""
    _, _, G, M, C = statistics(6, 3, 60)
    before, now = (torch.tensor(norm, dtype=F64, device=DEVICE) for norm in (1.5, 4.0))
    eps = 1e-3
    frozen = naive_operator(G, M, C, before, 2, eps, True, 1e-9)
    same = naive_operator(G, M, C, now, 2, eps * (before / now).item() ** 2, True, 1e-9)
    assert error(frozen, same) <= 1e-9
    assert error(frozen, naive_operator(G, M, C, now, 2, eps, True, 1e-9)) > 1e-6
