"""Echo: its layers and baselines by configuration, the paper's parameter counts, and the Koopman MLP."""

import math

import pytest
import torch

import hf_memmix
from hf_memmix import EchoConfig
from hf_memmix.mixers import KoopmanMLP
from testing import family_fields, random_ids

# parameters of a layer beside those with which the paper's counts were fitted: a Mamba-3 block, no gamma and eta
DIFFERENCES = {"mamba2": -3944, "ska": 8, "attention": 0}


@pytest.mark.parametrize(
    ("fields", "mixers", "stated"),
    [
        ({}, ["mamba2", "ska", "ska", "mamba2"], 982144),
        ({"num_ska_layers": 0}, ["mamba2"] * 4, 1111168),
        (
            {"num_ska_layers": 0, "attention_layers": [1, 2]},
            ["mamba2", "attention", "attention", "mamba2"],
            998528,
        ),
    ],
    ids=["ska", "ssm", "attention"],
)
def test_sub_million_models(fields, mixers, stated):
    """982K, 1.11M and 998K in the paper, whose state space layers are of another kind."""
    config = EchoConfig.preset("1m", **fields)
    assert config.mixer_types == mixers
    with torch.device("meta"):
        count = sum(p.numel() for p in hf_memmix.EchoForCausalLM(config).parameters())
    assert count == stated + sum(DIFFERENCES[kind] for kind in mixers)


@pytest.mark.parametrize(("layers", "count", "places"), [(24, 2, [8, 15]), (12, 4, [2, 4, 7, 9]), (5, 3, [1, 2, 3])])
def test_ska_layers_are_evenly_spaced_inside(layers, count, places):
    config = EchoConfig(num_hidden_layers=layers, num_ska_layers=count)
    assert [i for i, kind in enumerate(config.mixer_types) if kind == "ska"] == places


def test_refusals():
    with pytest.raises(ValueError, match=r"num_ska_layers=3 must be 0 to 2.*4 layers"):
        EchoConfig(num_hidden_layers=4, num_ska_layers=3)
    with pytest.raises(ValueError, match=r"feed_forward='relu'.*koopman_gated"):
        EchoConfig(feed_forward="relu")
    with pytest.raises(ValueError, match="number 7 must be even"):
        KoopmanMLP(4, 7)


@torch.no_grad()
def test_a_cache_knows_its_feed_forward(tmp_path):
    plain, gated = (
        hf_memmix.EchoForCausalLM(EchoConfig(**family_fields("Echo"), feed_forward=kind))
        for kind in ("koopman", "koopman_gated")
    )
    plain(random_ids(1, 7), use_cache=True).past_key_values.save_pretrained(tmp_path)
    hf_memmix.RecurrentStateCache.from_pretrained(tmp_path, plain.config)
    with pytest.raises(ValueError, match="feed_forward: cache 'koopman', model 'koopman_gated'"):
        hf_memmix.RecurrentStateCache.from_pretrained(tmp_path, gated.config)


@pytest.mark.parametrize("kind", ["koopman", "koopman_gated"])
def test_gradients_reach_every_parameter_from_the_first_steps(kind):
    """The zero-initialised output of SKA opens in one step."""
    torch.manual_seed(0)
    model = hf_memmix.EchoForCausalLM(EchoConfig(**family_fields("Echo"), feed_forward=kind))
    ids = random_ids(4, 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]


# ---- the Koopman MLP


def koopman(gated=False):
    torch.manual_seed(0)
    mlp = KoopmanMLP(8, 12, gated).double()
    mlp.init_weights()
    return mlp


@pytest.mark.parametrize("gated", [False, True])
def test_equations_of_the_paper(gated):
    """With the matrices K_i written out, some of them outside of the unit disk."""
    mlp, x = koopman(gated), torch.randn(3, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        mlp.spectrum.normal_()
    K = torch.zeros(12, 12, dtype=torch.float64)
    for i, (a, b) in enumerate(mlp.spectrum.T.tolist()):
        size = max(1.0, math.hypot(a, b))
        K[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[a, -b], [b, a]]) / size
    u = torch.nn.functional.silu(mlp.in_proj(x)) @ K.mT
    if gated:
        u = u * torch.nn.functional.silu(mlp.gate_proj(x))
    torch.testing.assert_close(mlp(x), mlp.out_proj(u), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e6], ids=["zero", "start", "huge"])
def test_pairs_never_grow(scale):
    """|K_i| <= 1 for any parameter, 1 at the start with angles from 0 to pi; gradients are finite, at 0 too."""
    mlp = koopman()
    with torch.no_grad():
        mlp.spectrum.mul_(scale)
    a, b = mlp.rotation()
    size = torch.hypot(a, b)
    torch.testing.assert_close(size, torch.full_like(size, min(scale, 1.0)))
    if scale == 1:
        torch.testing.assert_close(torch.atan2(b, a).abs(), torch.linspace(0, math.pi, 6).double(), rtol=0, atol=1e-6)
    mlp(torch.randn(2, 3, 8, dtype=torch.float64)).sum().backward()
    assert mlp.spectrum.grad.isfinite().all()


def test_a_third_fewer_parameters_than_swiglu():
    plain, gated = (sum(p.numel() for p in KoopmanMLP(96, 256, g).parameters()) for g in (False, True))
    assert plain == 2 * 96 * 256 + 256 and gated == 3 * 96 * 256 + 256
