"""The baselines of the comparisons: their recurrences are those of their papers, and they are exact in any split."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_memmix import memmix_config
from hf_memmix.mixers import GKAOptions
from hf_memmix.swap import memory_mixers
from hf_memmix.training.experiments.common.baselines import GLAOptions
from testing import backbone_config


def model(mixer: str, **options):
    backbone = backbone_config("llama", vocab_size=64, num_hidden_layers=2)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(memmix_config(backbone, mixer_types=[mixer] * 2, mixers={mixer: options}))


def test_it_is_gka_whose_blend_ignores_the_solution():
    gla, gka = model("gla", use_o_norm=False).double(), model("gka", use_o_norm=False).double()
    gka.load_state_dict(gla.state_dict(), strict=False)
    ids = torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for mixer in memory_mixers(gka).values():
            mixer.alpha_proj.weight.zero_()
            mixer.alpha_proj.bias.fill_(-1e3)  # alpha = 0
        a, b = gla(ids).logits, gka(ids).logits
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert GLAOptions().use_alpha is False and GKAOptions().use_alpha is True


@pytest.mark.parametrize(
    "mixer,options",
    [
        ("gla", {}),
        ("gla", {"use_v_conv": False}),
        ("gdn", {}),
        ("linear", {"decay": True, "use_v_conv": True}),
        ("mamba2-no-vconv", {"head_dim": 8, "state_size": 8}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
@pytest.mark.parametrize("split", [1, 7])
def test_a_split_sequence_is_the_whole(mixer, options, split):
    tested = model(mixer, **options).double().eval()
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = tested(ids).logits
        first = tested(ids[:, :split], use_cache=True)
        rest = tested(ids[:, split:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, rtol=1e-9, atol=1e-9)
    if mixer == "gla":
        assert all("H" not in layer.get() for layer in rest.past_key_values.layers)


def one_mixer(name: str, **options):
    """A mixer in float64 with gates that depend on the token, and inputs [1, T, C] of unit variance."""
    mixer = next(iter(memory_mixers(model(name, **options).double()).values())).eval()
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype))
    return mixer, torch.randn(1, 12, 32, generator=draws, dtype=torch.float64)


@torch.no_grad()
def test_gdn_is_the_equation_of_its_paper():
    """S_t = S_{t-1} a_t (I - b_t k k^T) + b_t v k^T, y_t = S_t q_t (arXiv:2412.06464, eq. 10), token by token."""
    mixer, x = one_mixer("gdn", use_v_conv=True)
    tokens = mixer.project(x, None)
    y, _ = mixer.scan(tokens, None)
    q, k, v, _ = mixer.convolve(tokens, None, None, None)
    q, k, v = mixer.split_heads(q, k, v, tokens, unit_norm=True)
    k, v = (t.repeat_interleave(mixer.heads // t.shape[2], 2) for t in (k, v))
    decay, step = mixer.f_proj(x).sigmoid(), mixer.gamma_proj(x).sigmoid()
    S, eye = mixer.start(), torch.eye(k.shape[-1], dtype=x.dtype)
    for t in range(x.shape[1]):
        a, b = decay[0, t, :, None, None], step[0, t, :, None, None]
        key = k[0, t, :, :, None]
        S = S @ (a * (eye - b * key * key.mT)) + b * v[0, t, :, :, None] * key.mT
        torch.testing.assert_close(y[0, t], (S @ q[0, t, :, :, None])[..., 0], rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_linear_attention_convolves_v_before_its_recurrence():
    """S_t = e^g S_{t-1} + k v^T, y_t = S_t^T q_t with convolved q, k and v, token by token."""
    mixer, x = one_mixer("linear", decay=True, use_v_conv=True)
    tokens = mixer.project(x, None)
    y, states = mixer.scan(tokens, None)
    q, _ = mixer.q_conv1d(tokens["qk"])
    k, _ = mixer.k_conv1d(tokens["qk"])
    v, conv = mixer.v_conv1d(tokens["v"])
    q, k, v = (t.unflatten(-1, (mixer.heads, -1))[0] for t in (q, k, v))
    q, k = (torch.nn.functional.normalize(t, dim=-1, eps=0) for t in (q, k))
    S = torch.zeros_like(states["S"][0])
    for t in range(x.shape[1]):
        S = tokens["log_decay"][0, t, :, None, None].exp() * S + k[t, :, :, None] * v[t, :, None, :]
        torch.testing.assert_close(
            y[0, t], (S.mT @ q[t, :, :, None])[..., 0] * q.shape[-1] ** -0.5, rtol=1e-4, atol=1e-4
        )
    torch.testing.assert_close(states["conv_v"], conv)
    assert "conv_v" not in one_mixer("linear", decay=True)[0].state_shapes(1)


@torch.no_grad()
def test_mamba2_without_a_convolution_of_x_convolves_b_and_c_only():
    sizes = {"head_dim": 8, "state_size": 8}
    mixer, x = one_mixer("mamba2-no-vconv", **sizes)
    whole, _ = one_mixer("mamba2", **sizes)
    xBC, features = mixer.project(x, None)["xBC"], mixer.features
    whole.conv1d.weight[features:], whole.conv1d.bias[features:] = mixer.conv1d.weight, mixer.conv1d.bias
    convolved, state = mixer.conv1d(xBC)
    expected, expected_state = whole.conv1d(xBC)
    torch.testing.assert_close(convolved[..., :features], xBC[..., :features])
    torch.testing.assert_close(convolved[..., features:], expected[..., features:])
    torch.testing.assert_close(state, expected_state[:, features:])
    assert mixer.state_shapes(1)["conv"][0] == (1, 16, 3)
