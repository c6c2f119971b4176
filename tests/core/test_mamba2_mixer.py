"""Mamba-2 beside its recurrence in float64 and beside transformers' own, with the same parameters by name."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as NativeMixer
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from hf_memmix.mixers import MIXERS
from hf_memmix.mixers.mamba2 import LARGEST_READOUT, GatedRMSNorm
from testing import assert_same, tiny_config

SIZES = {"state_size": 6, "head_dim": 8, "expand": 2, "n_groups": 2}
EPS = 1e-5
# The gated norm of transformers 5.17 takes one mean over all features. The official release and later versions of
# transformers take one mean per group, so with several groups 5.17 gives other outputs from the released weights.
NATIVE_NORM_HAS_GROUPS = "group_size" in inspect.signature(MambaRMSNormGated).parameters


def pair(hidden=32, limit=None, bias=False, n_groups=2, seed=0):
    """The native mixer, its parameters all random, and ours with them by name."""
    torch.manual_seed(seed)
    sizes = {**SIZES, "n_groups": n_groups}
    native = NativeMixer(
        Mamba2Config(
            **sizes, num_heads=8, hidden_size=hidden, use_bias=bias, chunk_size=4, num_hidden_layers=1,
            time_step_limit=limit or (0.0, float("inf")), layer_norm_epsilon=EPS,
        ),
        0,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in native.named_parameters():
            if name not in ("A_log", "dt_bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    options = {**sizes, "use_bias": bias, "time_step_limit": limit}
    ours = MIXERS["mamba2"](tiny_config("llama", (0,), "mamba2", options, hidden_size=hidden), 0)
    ours.load_state_dict(native.state_dict())  # strict: names and shapes are the native ones
    return native, ours


def recurrence(parameters, x, n_groups, norm_groups, limit=None):
    """The layer of the paper token by token, x [B, T, hidden] -> [B, T, hidden]; dtype of the parameters.

        h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t^T;  y_t = C_t h_t + D u_t;  out = W_o (RMSNorm(y silu(z)) w)

    Args:
        parameters: the layer's by name.
        n_groups: groups of heads that share B and C.
        norm_groups: parts of the features with a mean square of their own in the norm.
    """
    (batch, length, _), heads = x.shape, len(parameters["D"])
    channels, taps = parameters["conv1d.weight"].shape[0], parameters["conv1d.weight"].shape[-1]
    features = len(parameters["norm.weight"])
    shared = (channels - features) // 2
    projected = F.linear(x, parameters["in_proj.weight"], parameters.get("in_proj.bias"))
    z, convolved, dt = projected.split([features, channels, heads], -1)
    padded = F.pad(convolved, (0, 0, taps - 1, 0))
    convolved = sum(padded[:, i : i + length] * parameters["conv1d.weight"][:, 0, i] for i in range(taps))
    u, B, C = F.silu(convolved + parameters["conv1d.bias"]).split([features, shared, shared], -1)
    u = u.unflatten(-1, (heads, -1))
    B, C = (t.unflatten(-1, (n_groups, -1)).repeat_interleave(heads // n_groups, 2) for t in (B, C))
    dt = F.softplus(dt + parameters["dt_bias"]).clamp(*(limit or (0.0, torch.inf)))
    decay = (-dt * parameters["A_log"].exp()).exp()
    state, outputs = x.new_zeros(batch, heads, u.shape[-1], B.shape[-1]), []
    for t in range(length):
        write = dt[:, t, :, None, None] * u[:, t, ..., None] * B[:, t, :, None]
        state = decay[:, t, :, None, None] * state + write
        outputs.append((state * C[:, t, :, None]).sum(-1) + parameters["D"][:, None] * u[:, t])
    y = torch.stack(outputs, 1).flatten(2) * F.silu(z)
    y = y.unflatten(-1, (norm_groups, -1))
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)).flatten(2) * parameters["norm.weight"]
    return F.linear(y, parameters["out_proj.weight"], parameters.get("out_proj.bias"))


def output_and_gradients(fn, parameters, x):
    """The output of fn(x), and by name the gradients of the input and the parameters of a weighted sum of it."""
    x = x.detach().requires_grad_()
    y = fn(x)
    weights = torch.ones_like(y).cumsum(-1)
    grads = torch.autograd.grad((y * weights).sum(), [x, *parameters.values()])
    return {"output": y.detach()} | dict(zip(["input", *parameters], grads, strict=True))


CASES = pytest.mark.parametrize(
    ("limit", "bias", "n_groups"),
    [(None, False, 2), ([0.01, 0.05], True, 2), (None, True, 1)],
    ids=["released", "limits and biases", "one group"],
)


@CASES
def test_equals_recurrence(limit, bias, n_groups):
    ours = pair(limit=limit, bias=bias, n_groups=n_groups)[1].double()
    x, parameters = torch.randn(2, 21, 32, dtype=torch.float64), dict(ours.named_parameters())
    want = output_and_gradients(lambda x: recurrence(parameters, x, n_groups, n_groups, limit), parameters, x)
    got = output_and_gradients(lambda x: ours(x)[0], parameters, x)
    for name in want:
        assert_same(got[name], want[name], name, tolerance=1e-10)


@CASES
def test_parity_with_transformers(limit, bias, n_groups):
    """The library's layer equals ours, or where its norm ignores the groups, the recurrence with one mean."""
    native, ours = pair(limit=limit, bias=bias, n_groups=n_groups)
    x = torch.randn(2, 21, 32)
    want = output_and_gradients(native, dict(native.named_parameters()), x)
    if NATIVE_NORM_HAS_GROUPS or n_groups == 1:
        got = output_and_gradients(lambda x: ours(x)[0], dict(ours.named_parameters()), x)
    else:
        # in float32, as the library
        parameters = dict(ours.named_parameters())
        got = output_and_gradients(lambda x: recurrence(parameters, x, n_groups, 1, limit), parameters, x)
    for name in want:
        assert_same(got[name], want[name], name, tolerance=2e-5 if name == "output" else 1e-4)


def test_start_is_transformers():
    """A, D exactly; dt in its range; taps as large."""
    torch.manual_seed(0)
    native, ours = pair()
    ours.init_weights()
    native.init_mamba2_weights()
    for name in ("A_log", "D"):
        torch.testing.assert_close(getattr(ours, name), getattr(native, name))
    dt = torch.nn.functional.softplus(ours.dt_bias)
    assert ((dt > 9e-4) & (dt < 0.11)).all() and ours.conv1d.weight.abs().max() <= 0.5


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "random"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e3, 1e15, 1e30])
def test_no_nan(scale, constant):
    """The layer is of fifth order in its input, which a norm precedes in every model."""
    _, ours = pair()
    x = scale * (torch.ones(1, 40, 32) if constant else torch.randn(1, 40, 32))
    x.requires_grad_()
    y = ours(x)[0]
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in ours.parameters())
    with torch.no_grad():
        states, others = (ours.allocate_states(1, "cpu", torch.float32) for _ in range(2))
        steps = [ours.readout(ours.step(ours.project(x[:, t : t + 1], None), states), x) for t in range(40)]
        in_one_call = [ours.layer_step(x[:, t : t + 1], None, others) for t in range(40)]
    assert all(t.isfinite().all() for t in [*steps, *states.values()])
    if in_one_call[0] is not None:  # there is a compiler
        pairs = [(torch.cat(in_one_call), torch.cat(steps)), *zip(others.values(), states.values(), strict=True)]
        for one, apart in pairs:
            assert_same(one, apart, tolerance=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("size", (1e20, 1e30))
def test_readout_larger_than_the_clamp(size):
    """Its square would be infinite in float32, and the normed readout zero: it is that of the largest readout."""
    norm = GatedRMSNorm(8, 2, 1e-5)
    y = torch.linspace(-1, 1, 8).sign().expand(1, 3, 8)
    z = torch.linspace(0.5, 2, 8).expand(1, 3, 8)
    assert_same(norm(size * y, z), norm(LARGEST_READOUT * y, z), tolerance=1e-6)
    assert norm(size * y, z).abs().min() > 0.1
