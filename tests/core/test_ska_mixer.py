"""What is SKA's own: the paper's start and equations, action masks, refreshing at every token, low-rank scores."""

import pytest
import torch

import hf_memmix
from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.from_attention.ska import low_rank_scores
from hf_memmix.mixers import MIXERS
from hf_memmix.token_layout import TokenLayout
from hf_memmix_kernels import naive_ska
from testing import assert_same, build, mixers_of, random_ids, tiny_config, tiny_model
from tiny_teachers import tiny_teacher


def fresh(**options):
    """An untrained layer, 4 heads of size 8 in two groups."""
    torch.manual_seed(0)
    mixer = MIXERS["ska"](tiny_config("llama", (0,), "ska", options), 0)
    mixer.init_weights()
    return mixer


def with_options(**options):
    return build(tiny_config("llama", "all", "ska", options), dtype=torch.float64)


def test_start_of_the_paper():
    """Orthogonal keys and queries, a zero output, gamma 1 and eta 1.5."""
    mixer = fresh()
    for weight in (mixer.q_proj.weight, mixer.k_proj.weight):
        product = weight @ weight.mT
        torch.testing.assert_close(product, torch.eye(len(product)), atol=1e-5, rtol=0)
    assert (mixer.o_proj.weight == 0).all() and (mixer.gamma == 1).all() and (mixer.eta == 1.5).all()
    assert (mixer(torch.randn(1, 20, 32))[0] == 0).all()


def test_equations_of_the_paper():
    mixer = fresh().double()
    with torch.no_grad():
        mixer.gamma.copy_(torch.tensor([0.7, 1.0, 1.2, 0.9]))
        mixer.o_proj.weight.copy_(torch.eye(32))
    x = torch.randn(2, 23, 32, dtype=torch.float64)
    q, k, v = (f(x).unflatten(-1, (-1, d)) for f, d in ((mixer.q_proj, 6), (mixer.k_proj, 6), (mixer.v_proj, 8)))
    expected, _ = naive_ska(q, k, v, None, mixer.gamma, mixer.eta, chunk_size=4, eps=0.1)
    assert_same(mixer(x)[0], expected.flatten(2))


@torch.no_grad()
def test_refreshing_at_every_token_is_a_chunk_of_one():
    ids = random_ids(2, 19)
    assert_same(with_options(refresh_every=1)(ids).logits, with_options(chunk_size=1)(ids).logits)


@torch.no_grad()
def test_sequence_max_normalization():
    """It changes only the ridge, so the result differs a little."""
    ids = random_ids(2, 19)
    moved = with_options(normalization="sequence_max")(ids).logits - with_options()(ids).logits
    assert moved.abs().max() > 0 and moved.isfinite().all()


# ---- action masks


@torch.no_grad()
def test_action_mask_stores_the_chosen_tokens_only():
    """In one forward, in several, padded and packed; what is not stored does not move later tokens."""
    model = tiny_model("llama", "all", "ska")
    mixer = mixers_of(model)[0]
    x = torch.randn(2, 19, 32, dtype=torch.float64)
    mask = torch.rand(2, 19) < 0.6
    whole = mixer(x, action_mask=mask)[0]
    q, k, v = (mixer.project(x, None)[name] for name in "qkv")
    expected, _ = naive_ska(q, k, v, mask, mixer.gamma, mixer.eta, chunk_size=4, eps=0.1)
    assert_same(whole, mixer.readout(expected, x))
    assert_same(mixer(x[:1], action_mask=torch.ones(1, 19))[0], mixer(x[:1])[0])

    bounds = torch.tensor([0, 7, 19, 38])
    packed = mixer(x, action_mask=mask, memmix_layout=TokenLayout(cu_seqlens=bounds))[0]
    parts = [mixer(x[:1, a:b], action_mask=mask[:1, a:b])[0] for a, b in ((0, 7), (7, 19))]
    assert_same(packed[:1], torch.cat(parts, 1))

    ids, pads = random_ids(2, 19), torch.zeros(2, 4, dtype=torch.long)
    cache, parts = None, []
    for part, stored in zip(ids.split((5, 1, 1, 12), 1), mask.split((5, 1, 1, 12), 1), strict=True):
        out = model(part, action_mask=stored, past_key_values=cache, use_cache=True)
        cache, _ = out.past_key_values, parts.append(out.logits)
    full = model(ids, action_mask=mask).logits
    assert_same(torch.cat(parts, 1), full)
    assert (full - model(ids).logits).abs().max() > 1e-3
    padded = model(
        torch.cat([pads, ids], 1),
        attention_mask=torch.cat([pads, torch.ones_like(ids)], 1),
        action_mask=torch.cat([pads.bool(), mask], 1),
    )
    assert_same(padded.logits[:, 4:], full)


@torch.no_grad()
def test_action_mask_of_single_tokens():
    """In float32 and for one sequence, where native code computes a layer without a mask in one call."""
    model, ids, mask = (
        tiny_model("llama", "all", "ska", dtype=torch.float32),
        random_ids(1, 19),
        torch.rand(1, 19) < 0.6,
    )
    cache, parts = hf_memmix.RecurrentStateCache(model.config), []
    for part, stored in zip(ids.split(1, 1), mask.split(1, 1), strict=True):
        parts.append(model(part, action_mask=stored, past_key_values=cache).logits)
    assert_same(torch.cat(parts, 1), model(ids, action_mask=mask).logits, tolerance=1e-4)


@pytest.mark.parametrize("mask", [torch.ones(2, 8), torch.ones(9), torch.ones(1, 9), True])
def test_action_mask_of_another_shape_is_refused(mask):
    with pytest.raises(ValueError, match=r"action_mask of layer 0 .* expected \[2, 9\].*into a cache"):
        tiny_model("llama", (0,), "ska")(random_ids(2, 9), action_mask=mask)


# ---- bad input


@torch.no_grad()
def test_a_state_of_other_chunks_is_refused(tmp_path):
    model, ids = tiny_model("llama", "all", "ska"), random_ids(1, 11)
    cache = model(ids, use_cache=True).past_key_values
    cache.save_pretrained(tmp_path)
    other = with_options(chunk_size=8)
    with pytest.raises(ValueError, match=r"mixers\.ska\.chunk_size: cache 4, model 8"):
        hf_memmix.RecurrentStateCache.from_pretrained(tmp_path, other.config)
    with pytest.raises(ValueError, match=r"mixers\.ska\.chunk_size: cache 4, model 8"):
        other(ids, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("refresh_every", [None, 1])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 1e8], ids=["zero", "tiny", "constant", "huge"])
def test_no_nan(scale, refresh_every):
    mixer = fresh(refresh_every=refresh_every)
    torch.nn.init.normal_(mixer.o_proj.weight)
    x = torch.full((1, 40, 32), scale, requires_grad=True)
    y = mixer(x)[0]
    y.sum().backward()
    gradients = [x.grad, *(p.grad for p in mixer.parameters())]
    assert y.isfinite().all() and all(g.isfinite().all() for g in gradients)
    states, others = (mixer.allocate_states(1, "cpu", torch.float32) for _ in range(2))
    with torch.no_grad():
        steps = [mixer.step(mixer.project(token, None), states) for token in x.split(1, 1)]
        in_one_call = [mixer.layer_step(token, None, others) for token in x.split(1, 1)]
    assert all(step.isfinite().all() for step in steps)
    if in_one_call[0] is not None:  # there is a compiler
        assert all(step.isfinite().all() for step in in_one_call)


# ---- the start from attention


@pytest.mark.parametrize("rank", [1, 3, 5, 9])
def test_scores_of_a_lower_rank_are_the_best(rank):
    """The error is the tail of the singular values; random ranks do worse; from D on nothing is lost."""
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(h, 5, 11, generator=generator, dtype=torch.float64) for h in (4, 2))
    U, V = low_rank_scores(A, B, rank)
    assert U.shape == (4, rank, 11) and V.shape == (2, rank, 11)
    true = A.mT @ B.repeat_interleave(2, 0)
    error = (U.mT @ V.repeat_interleave(2, 0) - true).unflatten(0, (2, 2)).square().sum((1, 2, 3))
    S = torch.linalg.svdvals(true.unflatten(0, (2, 2)).flatten(1, 2))
    torch.testing.assert_close(error, S[:, rank:].square().sum(-1), atol=1e-20, rtol=1e-8)
    chosen = torch.linalg.qr(torch.randn(5, min(rank, 5), generator=generator, dtype=torch.float64))[0]
    projector = chosen @ chosen.mT
    random = (A.mT @ projector @ B.repeat_interleave(2, 0) - true).unflatten(0, (2, 2)).square().sum((1, 2, 3))
    assert rank >= 5 or (random > error).all()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_scores_of_full_rank_equal_those_of_the_attention(family):
    """q . k of every pair of tokens, biases included; a norm leaves its scale."""
    teacher = tiny_teacher(family).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in teacher.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    student = convert_model(teacher, "ska", keep=[1])
    attention, mixer = attention_module(teacher, 0), attention_module(student, 0)
    x = torch.randn(1, 9, 32, generator=generator, dtype=torch.float64)
    tokens = mixer.project(x, None)
    q, k = (f(x).unflatten(-1, (-1, attention.head_dim)) for f in (attention.q_proj, attention.k_proj))
    if family == "qwen3":
        q, k = q * attention.q_norm.weight, k * attention.k_norm.weight
    group = q.shape[2] // k.shape[2]
    expected, actual = (
        torch.einsum("bthd,bshd->bhts", a, b.repeat_interleave(group, 2))
        for a, b in ((q, k), (tokens["q"], tokens["k"]))
    )
    assert_same(actual, expected, tolerance=1e-5)
    assert_same(tokens["v"].flatten(2), attention.v_proj(x), tolerance=1e-6)


def test_attention_that_the_mixer_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="bias would be lost.*qkv_bias=True"):
        convert_model(tiny_teacher("qwen2"), "ska", qkv_bias=False)
