"""Models on a CPU: native code and the torch path give the same logits, states and gradients.

The other tests of the core compare float64 models, which native code does not run.
"""

import copy

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import DynamicCache, StaticCache

from core.checks import left_padded, positions_of
from core.mixer_variants import VARIANTS, every_third_variant, made
from hf_memmix.mixers.layers import ShortConvolution
from hf_memmix_kernels import _native
from testing import MIXERS, assert_same, random_ids, tiny_model

pytestmark = pytest.mark.skipif(_native.compiler() is None, reason="needs a C++ compiler")

# of |difference| / |expected|: native code adds in another order, and a random model amplifies the roundings of its
# dtype. The torch path differs from float64 by up to 2e-6 and 4e-2
BOUNDS = {torch.float32: 3e-5, torch.bfloat16: 6e-2}
PROMPT, STEPS = 9, 5

every_mixer = pytest.mark.parametrize("mixer", MIXERS)
both_dtypes = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


@pytest.fixture
def on_both_paths(monkeypatch):
    """A function that returns the results of a call on the torch path and with native code."""
    libraries, load = [], _native.library

    def counted(op, needed=False):
        libraries.append(op)
        return load(op, needed)

    def run(call):
        monkeypatch.setattr(_native, "library", counted)
        monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")
        expected = call()
        assert not libraries
        monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
        actual = call()
        assert libraries, "native code did not run"
        return expected, actual

    return run


def assert_near(actual, expected, dtype):
    error = torch.linalg.vector_norm(actual.double() - expected.double()) / torch.linalg.vector_norm(expected.double())
    assert error < BOUNDS[dtype]


def decoded(model, ids, mask, cache):
    """Logits [B, 1 + STEPS, V] of a prompt's last token and of the given tokens after it, one at a time."""
    logits, bounds = [], [0, *range(PROMPT, PROMPT + STEPS + 1)]
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        out = model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions_of(mask)[:, start:end],
            past_key_values=cache,
        )
        logits.append(out.logits[:, -1])
    return torch.stack(logits, 1)


# every two of them meet
CASES = [
    (torch.float32, DynamicCache, False),
    (torch.float32, StaticCache, True),
    (torch.bfloat16, DynamicCache, True),
    (torch.bfloat16, StaticCache, False),
]


@torch.no_grad()
@every_mixer
@pytest.mark.parametrize(("dtype", "cache", "padded"), CASES)
def test_decoding(mixer, dtype, cache, padded, on_both_paths):
    model = tiny_model("llama", "first", mixer, dtype=dtype)
    length = PROMPT + STEPS
    ids, mask = left_padded([random_ids(1, length), random_ids(1, length - 4 * padded, seed=1)])
    size = {"max_cache_len": length} if cache is StaticCache else {}
    expected, actual = on_both_paths(lambda: decoded(model, ids, mask, cache(config=model.config, **size)))
    assert actual.dtype == expected.dtype
    assert_near(actual, expected, dtype)


def scaled(layer, args, output):
    """Each channel by another factor, some negative: a norm would undo one factor for all."""
    y, *rest = output if isinstance(output, tuple) else (output,)
    y = y * torch.linspace(-1, 2.1, y.shape[-1])
    return (y, *rest) if rest else y


@torch.no_grad()
@every_third_variant
def test_hooks_of_a_mixers_layers_run_in_every_step(mixer, options, monkeypatch):
    """With a hook that changes a layer's output, steps still give what a scan gives.

    Hooks bring weights that are offloaded. Native code that joins several layers must not pass them by.
    """
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    layer, x, rotary = made(mixer, options)
    layer, x, rotary = layer.float(), x.float(), tuple(angle.float() for angle in rotary)

    def outputs():
        states = {k: v.clone() for k, v in layer.initial_states(3, x.device, x.dtype).items()}
        # native code takes what lies in one piece, as the input of a decode step does
        parts = [
            (x[:, t : t + 1].contiguous(), tuple(angle[:, t : t + 1] for angle in rotary)) for t in range(x.shape[1])
        ]
        steps = [layer.readout(layer.step(layer.project(*part), states), part[0]) for part in parts]
        return torch.cat(steps, 1), layer.readout(layer.scan(layer.project(x, rotary), None)[0], x)

    plain, _ = outputs()
    inner = [child for child in layer.modules() if isinstance(child, (torch.nn.Linear, ShortConvolution))]
    hooks = [child.register_forward_hook for child in inner]
    for register in [*hooks, register_module_forward_hook]:  # the last one hooks all modules
        handle = register(scaled)
        steps, whole = outputs()
        handle.remove()
        assert_same(steps, whole, str(register), tolerance=1e-3)
        assert (steps - plain).abs().max() > 1e-3 * plain.abs().max()


IN_ONE_CALL = ("window", "gated_delta", "kda", "gka", "mamba2", "lattice", "ska", "coffee")
ALL = {"use_rope": True, "qk_norm": "head", "qkv_bias": True, "o_bias": True}
LAYERS = [
    *[row for row in VARIANTS if row[0] in IN_ONE_CALL],
    ("window", ALL | {"sink_logits": True, "softcap": 2.0}),
    *[(mixer, ALL | {"gate_bias": True}) for mixer in ("gated_delta", "kda", "gka")],
    ("lattice", ALL | {"gate_bias": True, "slots": None, "share_qk": False}),
    ("lattice", {"variant": "enc", "step_size": "softplus"}),  # steps beyond the largest one
    ("ska", {"qkv_bias": True, "o_bias": True, "power": 3}),
    ("coffee", {"use_gate": True, "gate_bias": True, "u_bias": True, "o_bias": True, "use_output_filter": True}),
]


@torch.no_grad()
@both_dtypes
@pytest.mark.parametrize(("mixer", "options"), LAYERS, ids=str)
def test_a_layers_step_in_one_call(mixer, options, dtype, monkeypatch):
    """Outputs and states of one sequence equal those of float64, far beyond a window; hooks keep a layer from it."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    layer, x, rotary = made(mixer, options)
    for parameter in layer.parameters():
        if parameter.ndim == 1:  # biases, norms and logits
            parameter.add_(torch.randn_like(parameter) / 2)
    if (mixer, options) == ("lattice", {}):
        layer.f_proj.bias[0] = -200  # a head that forgets all: e^200 is no float32
    x, *rotary = (t[:1].repeat(1, 4, 1) for t in (x, *rotary))
    layer, (x, *rotary) = layer.to(dtype), (t.to(dtype) for t in (x, *rotary))
    exact, states = copy.deepcopy(layer).double(), layer.initial_states(1, "cpu", dtype)
    tokens = [(x[:, t : t + 1], tuple(angle[:, t : t + 1] for angle in rotary)) for t in range(x.shape[1])]
    found = [layer.layer_step(*token, states) for token in tokens]
    aside = options.get("refresh_every") == 1 or any(
        options.get(name) for name in ("output_gate", "local_window", "sketch_dim", "l1", "use_cg_lift")
    )
    whole = all(options.get(name, True) for name in ("use_decay", "use_beta", "use_alpha", "project"))
    if aside or not whole or options.get("variant") in ("ttt", "delta"):
        first = layer.initial_states(1, "cpu", dtype)
        assert found == [None] * len(found) and all(torch.equal(first[name], states[name]) for name in states)
        return
    y, after = exact.scan(exact.project(x.double(), tuple(angle.double() for angle in rotary)), None)
    bound = BOUNDS[dtype] / 3
    assert_same(torch.cat(found, 1).double(), exact.readout(y, x.double()), "output", tolerance=bound)
    for name, state in states.items():
        assert_same(state.double(), after[name].double(), name, tolerance=bound)
    for child in layer.children():
        for register in (child.register_forward_hook, register_module_forward_pre_hook):
            handle = register(lambda *_: None)
            assert layer.layer_step(*tokens[0], states) is None
            handle.remove()
        weight = child.weight
        del child.weight  # as `prune.remove` and `remove_parametrizations` do: the bias is the first parameter then
        child.weight = weight
    again = layer.layer_step(*tokens[0], layer.initial_states(1, "cpu", dtype))
    assert torch.equal(again, found[0])
    tensor = child.weight.detach()
    del child.weight
    child.weight = tensor
    assert layer.layer_step(*tokens[0], states) is None


@pytest.mark.parametrize("mixer", ["gka", "lattice", "mamba2", "kda"])
@both_dtypes
def test_training(mixer, dtype, on_both_paths):
    model = tiny_model("llama", "first", mixer, dtype=dtype, fresh=True).train()
    ids, mask = left_padded([random_ids(1, 13), random_ids(1, 6, seed=1)])

    def gradients():
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss.backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    expected, actual = on_both_paths(gradients)
    assert_near(actual, expected, dtype)
