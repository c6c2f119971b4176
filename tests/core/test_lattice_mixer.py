"""What is Lattice's own: slots of unit norm, their learned start, the step size, and a start from attention."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_memmix import RecurrentStateCache
from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_module
from hf_memmix_kernels import naive_lattice
from testing import mixers_of, random_ids, randomize, tiny_config
from tiny_teachers import tiny_teacher

X = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(5))


def fresh(**options):
    """The mixer of an untrained layer: 4 query heads of 8 channels, 2 value heads."""
    torch.manual_seed(0)
    return mixers_of(AutoModelForCausalLM.from_config(tiny_config("llama", (0,), "lattice", options)))[0]


@pytest.mark.parametrize("slots", (1, 6, None))
def test_slots_start_orthonormal_and_differ_between_heads(slots):
    mixer = fresh(slots=slots)
    S0 = mixer.S0.detach()
    assert S0.shape == (4, 8, slots or 8) and S0.dtype == torch.float32
    torch.testing.assert_close(S0.mT @ S0, torch.eye(S0.shape[-1]).expand(4, -1, -1), rtol=0, atol=1e-5)
    assert (S0[0] - S0[1]).abs().max() > 0.1


@pytest.mark.parametrize(("share_qk", "copied"), [(True, [2]), (False, [2, 2])], ids=["shared", "separate"])
def test_only_heads_that_several_query_heads_share_are_copied(share_qk, copied, monkeypatch):
    """With one projection for q and k, k has all heads already."""
    mixer, repeated, repeat = fresh(share_qk=share_qk), [], torch.Tensor.repeat_interleave

    def record(x, *args):
        repeated.append(x.shape[2])
        return repeat(x, *args)

    monkeypatch.setattr(torch.Tensor, "repeat_interleave", record)
    mixer.scan(mixer.project(X, None), None)
    assert repeated == copied


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    ({}, {"use_forget_gate": True}, {"project": False}, {"variant": "delta"}, {"variant": "enc"}),
    ids=str,
)
def test_layer_is_the_recurrence_on_its_projections(options):
    """Shared projection, separate convolutions, a step size per head and token, values repeated for their queries."""
    mixer = randomize(fresh(**{"use_forget_gate": False, **options})).double()
    x = X.double()
    tokens = mixer.project(x, None)
    assert tokens["q"] is tokens["k"]

    def heads(conv):
        padded = torch.nn.functional.pad(tokens["q"], (0, 0, 3, 0)).unfold(1, 4, 1)
        y = torch.nn.functional.silu((padded * conv.weight.squeeze(1)).sum(-1)).unflatten(-1, (4, 6))
        return torch.nn.functional.normalize(y, dim=-1)

    gamma = torch.sigmoid(mixer.gamma_proj(x))
    decay = torch.sigmoid(mixer.f_proj(x)).log() if options.get("use_forget_gate") else None
    v = tokens["v"].unflatten(-1, (2, 8))[:, :, [0, 0, 1, 1]]
    if options.get("variant") == "enc":
        v = torch.nn.functional.normalize(v, dim=-1)
    expected, S = naive_lattice(
        heads(mixer.q_conv1d),
        heads(mixer.k_conv1d),
        v,
        gamma,
        decay,
        variant=options.get("variant", "dec"),
        project=options.get("project", True) and options.get("variant") != "delta",
        initial_state=mixer.start().expand(2, -1, -1, -1),
    )
    y, states = mixer.scan(tokens, None)
    # the unit norm of q and k adds 1e-6 to the length
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states["S"], S, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    ({"use_forget_gate": True}, {}, {"gamma_max": 9.0}, {"step_size": "softplus"}),
    ids=str,
)
def test_enc_learns_a_repeated_token_of_any_size(options):
    """S^T v = k in the end, and the gradient reaching the start has shrunk; both diverge where gamma |v|^2 > 2."""
    mixer = randomize(fresh(**{"variant": "enc", "use_forget_gate": False, **options})).double()
    with torch.no_grad():
        mixer.v_proj.weight.mul_(1000)
        for name, bias in (("gamma_proj", 4.0), ("f_proj", -4.0)):
            if hasattr(mixer, name):
                getattr(mixer, name).weight.zero_()
                getattr(mixer, name).bias.fill_(bias)
    tokens = mixer.project(X.double()[:, :1].expand(-1, 200, -1), None)
    S = mixer.start().double().expand(2, -1, -1, -1).detach().requires_grad_()
    taps = {name: torch.zeros(shape).double() for name, (shape, _) in mixer.state_shapes(2).items()}
    y, states = mixer.scan(tokens, {**taps, "S": S})
    q = k = mixer.k_conv1d(tokens["k"])[0]
    _, k, v = mixer.heads_for_memory(q, k, tokens["v"], tokens)
    found = torch.einsum("bhdm,bhd->bhm", states["S"], v[:, -1])
    # not geometric where k_i is near 1: there a slot meets v itself, and what may be written shrinks
    torch.testing.assert_close(found, k[:, -1], rtol=0, atol=1e-2)
    (grad,) = torch.autograd.grad(y[:, -1].square().sum(), S)
    assert grad.abs().max() < 10


@torch.no_grad()
@pytest.mark.parametrize("options", ({}, {"project": False}, {"variant": "delta"}), ids=str)
def test_saved_state_with_columns_of_another_norm(options, tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config("llama", (0,), "lattice", options))
    cache = RecurrentStateCache(model.config)
    model(random_ids(1, 5), past_key_values=cache)
    cache.layers[0].states["S"][0, 1, :, 2] *= 1.01
    cache.save_pretrained(tmp_path)
    if options:
        RecurrentStateCache.from_pretrained(tmp_path)
    else:
        with pytest.raises(ValueError, match=r"layer 0: .*slot.* has norm 1\.01"):
            RecurrentStateCache.from_pretrained(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("value", (0.0, float("nan"), float("inf")))
def test_saved_start_without_direction(value, tmp_path):
    """Columns of any norm except zero are allowed, because S_0 is normalised when it is used."""
    model = AutoModelForCausalLM.from_config(tiny_config("llama", (0,), "lattice"))
    S0 = mixers_of(model)[0].S0
    S0[1, :, 2] = 7.0
    model.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    S0[1, :, 2] = value
    model.save_pretrained(tmp_path)
    for asked in ({}, {"output_loading_info": True}):
        with pytest.raises(ValueError, match="layer 0: 1 columns of S0 have norm"):
            AutoModelForCausalLM.from_pretrained(tmp_path, **asked)


@pytest.mark.parametrize(
    ("step_size", "low", "high"), [("sigmoid", 0, 1.5), ("constant", 0, 1.5), ("softplus", 0, float("inf"))]
)
def test_step_sizes(step_size, low, high):
    mixer = fresh(step_size=step_size, gamma_max=1.5)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name.startswith("gamma"):
                parameter.normal_()
    gamma = mixer.project(X, None)["gamma"]
    assert gamma.shape == (2, 11, 4) and gamma.dtype == torch.float32
    assert ((gamma > low) & (gamma < high)).all()
    assert (gamma.std((0, 1)) > 0.1).all() == (step_size != "constant")


@torch.no_grad()
@pytest.mark.parametrize("variant", ("dec", "enc", "sim", "delta"))
@pytest.mark.parametrize("project", (True, False))
@pytest.mark.parametrize("use_forget_gate", (True, False))
def test_only_enc_limits_its_steps(use_forget_gate, project, variant):
    """To 3/2, and with projection to 3/2 of the forget gate: there a slot that shrinks has the effect of a step."""
    mixer = fresh(variant=variant, project=project, use_forget_gate=use_forget_gate, gamma_max=9.0)
    tokens = randomize(mixer).project(X, None)
    largest = torch.full_like(tokens["gamma"], 1.5)
    if use_forget_gate and project:
        largest = largest * tokens["log_decay"].exp()
    mixer.plain = mixer.plain | {"variant": "dec"}  # whose steps have no limit
    free = mixer.project(X, None)["gamma"]
    assert (free > largest).any()
    torch.testing.assert_close(tokens["gamma"], free.minimum(largest) if variant == "enc" else free)


def test_rotary_embeddings_wider_than_the_slots():
    mixer = fresh(slots=6, use_rope=True)
    with pytest.raises(ValueError, match="rotary embeddings turn 8 channels, q and k have 6"):
        mixer.project(X, (torch.ones(2, 11, 8), torch.zeros(2, 11, 8)))
    with pytest.raises(ValueError, match="no rotary embeddings"):
        mixer.project(X, None)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_start_from_attention(family):
    """Queries and keys bit for bit, large values; convolutions pass on, gate and step size look at no token."""
    teacher = tiny_teacher(family)
    student = convert_model(teacher, "lattice", keep=[0])
    attention, mixer = attention_module(teacher, 1), attention_module(student, 1)
    for name in ("q_proj", "k_proj"):
        assert torch.equal(getattr(mixer, name).weight, getattr(attention, name).weight)
    values = mixer.v_proj.weight.unflatten(0, (mixer.kv_heads, -1))
    torch.testing.assert_close(values.square().sum((1, 2)), torch.full((mixer.kv_heads,), 100.0))
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(1))
    tokens = mixer.project(x, teacher.model.rotary_emb(x, torch.arange(9)[None]))
    torch.testing.assert_close(mixer.q_conv1d(tokens["q"])[0], attention.q_proj(x))
    assert (tokens["gamma"] == 0.5).all()
    y = mixer.scan(tokens, None)[0]
    gate = torch.nn.functional.gelu(mixer.g_proj.bias)
    # read through the output, values are what the attention makes of them
    ours, theirs = (
        layer.v_proj(x).unflatten(-1, (mixer.kv_heads, -1)).repeat_interleave(mixer.heads // mixer.kv_heads, 2)
        for layer in (mixer, attention)
    )
    torch.testing.assert_close(mixer.readout(ours, x), attention.o_proj(theirs.flatten(2) * gate))
    assert mixer.readout(y, x).isfinite().all()
    assert len(gate.unique()) == 1 and abs(gate[0] - 0.157) < 0.001
    with pytest.raises(ValueError, match="convert with share_qk=False"):
        convert_model(teacher, "lattice", share_qk=True)
