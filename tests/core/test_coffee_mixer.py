"""What is COFFEE's own: the range of lambda, its time scales at the start, and a start from attention as averages."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_module
from testing import assert_same, mixers_of, randomize, tiny_config
from tiny_teachers import tiny_teacher


def fresh(**options):
    torch.manual_seed(0)
    return mixers_of(AutoModelForCausalLM.from_config(tiny_config("llama", (0,), "coffee", options)))[0]


@torch.no_grad()
def test_time_scales_start_log_uniform():
    mixer = fresh(states=16, inner_size=256)
    tau = -1 / torch.log1p(mixer.lam() / 2)
    quantiles = torch.quantile(tau.log() / math.log(1000), torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    torch.testing.assert_close(quantiles, torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), rtol=0, atol=0.03)


@torch.no_grad()
def test_gates_and_readouts_start_at_unit_size():
    """Over the size that a state has with white inputs and gates of one half, w is N(0, 1) and C is N(0, 1 / n)."""
    mixer = fresh(states=16, inner_size=256, conv_activation=None)
    w = mixer.w.clone()
    mixer.w.zero_()
    mixer.u_conv1d.weight.zero_()
    mixer.u_conv1d.weight[:, :, -1] = 1
    tau = -1 / torch.log1p(mixer.lam() / 2)
    short = tau < 30  # stationary after the first tokens, and seen many times over
    # a state for each of many sequences
    u = torch.randn(100, 200, 256, generator=torch.Generator().manual_seed(1))
    size = mixer.scan({"u": u}, None)[1]["x"].std(0)[short]
    assert 0.9 < (w[short] * size).std() < 1.1
    assert 0.9 < (mixer.C[short] * size).std() * 16**0.5 < 1.1


@pytest.mark.parametrize("logit", [-1e30, -20.0, 0.0, 20.0, 1e30])
def test_no_parameter_leaves_the_stable_range(logit):
    mixer = fresh()
    with torch.no_grad():
        mixer.lam_logit.fill_(logit)
    assert ((mixer.lam() >= -2) & (mixer.lam() <= 0)).all()
    x = mixer.scan({"u": torch.ones(1, 400, mixer.features)}, None)[1]["x"]
    assert x.isfinite().all() and x.abs().max() <= 400


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{}, {"use_output_filter": True}, {"use_gate": False}, {"use_o_norm": False}, {"gate_bias": True, "u_bias": True}],
    ids=str,
)
def test_layer_is_its_equations(options):
    """out = W_o (RMSNorm(y) * silu(W_z h)) with y = sum_j C_j x_j, token by token."""
    mixer = randomize(fresh(use_gate=True, **options) if "use_gate" not in options else fresh(**options)).double()
    h = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    padded = F.pad(mixer.u_proj(h), (0, 0, 3, 0)).unfold(1, 4, 1)
    u = F.silu((padded * mixer.u_conv1d.weight.squeeze(1)).sum(-1))
    x, outputs = torch.zeros(2, 48, 3, dtype=torch.float64), []
    for t in range(11):
        s = torch.sigmoid(mixer.w * x)
        x = (1 + mixer.lam() * s) * x + s * u[:, t, :, None]
        y = (mixer.C * x).sum(-1)
        outputs.append(y * torch.sigmoid((mixer.w_filter * x).sum(-1)) if "use_output_filter" in options else y)
    y = torch.stack(outputs, 1)
    if mixer.options.use_o_norm:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * mixer.o_norm.weight
    if mixer.options.use_gate:
        y = y * F.silu(mixer.z_proj(h))
    assert_same(mixer(h)[0], mixer.o_proj(y))


@pytest.mark.parametrize(("name", "value"), [("lam_logit", math.nan), ("w", math.inf), ("C", math.nan)])
def test_a_checkpoint_that_diverged_is_refused(name, value, tmp_path):
    """lambda can leave [-2, 0] only if its logit is NaN."""
    model = AutoModelForCausalLM.from_config(tiny_config("llama", (0,), "coffee", {}))
    with torch.no_grad():
        getattr(mixers_of(model)[0], name)[1, 0] = value
    model.save_pretrained(tmp_path)
    for asked in ({}, {"output_loading_info": True}):
        with pytest.raises(ValueError, match=f"layer 0: 1 values of {name} are not finite"):
            AutoModelForCausalLM.from_pretrained(tmp_path, **asked)


def test_states_that_diverged_are_refused():
    mixer = fresh()
    states = mixer.allocate_states(1, "cpu", torch.float32)
    mixer.check_states(mixer.options, states)
    states["x"][0, 0, 0] = math.inf
    with pytest.raises(ValueError, match="1 values that are not finite"):
        mixer.check_states(mixer.options, states)


@pytest.mark.parametrize("filtered", [False, True])
def test_start_is_the_mean_of_averages_of_values(filtered):
    """y = 3/4 o(mean_j of averages of v with weights e^(-age / tau_j)), as if attention looked back that far."""
    teacher = tiny_teacher("llama").double()
    student = convert_model(teacher, "coffee", keep=[1], states=3, use_output_filter=filtered)
    x = torch.randn(1, 50, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    attention, mixer = attention_module(teacher, 0), attention_module(student, 0)
    v = attention.v_proj(x).unflatten(-1, (-1, attention.head_dim))
    v = v.repeat_interleave(attention.num_key_value_groups, 2).flatten(2)
    ages = torch.arange(50)[:, None] - torch.arange(50)
    expected = 0
    for tau in (2.0, 128**0.5, 64.0):
        kept = math.exp(-1 / tau)
        weights = torch.where(ages >= 0, (1 - kept) * kept ** ages.clamp_min(0).double(), 0)
        expected = expected + weights @ v / 3
    torch.testing.assert_close(mixer(x)[0], 0.75 * attention.o_proj(expected), rtol=1e-3, atol=1e-5)


def test_attention_that_the_mixer_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="inner_size=32"):
        convert_model(tiny_teacher("llama"), "coffee", inner_size=48)
    with pytest.raises(ValueError, match="v_bias would be lost.*u_bias=True"):
        convert_model(tiny_teacher("qwen2"), "coffee", u_bias=False)
