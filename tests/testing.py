"""Tables and helpers of all tests: decoder families, mixers, layouts, tiny models, comparisons.

With a row in MIXERS, every test of `tests/core` also runs for a new mixer; MODELS has the rows of families that are
trained from scratch, FAMILIES those of transformers' decoder families. Models are tiny, random and cached per process;
a test that changes a model passes `fresh=True`. Most comparisons are made in float64, where a wrong result and a
rounding error differ by ten orders of magnitude.
"""

import copy
import functools
import itertools

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_memmix
from hf_memmix.mixers import GKAMixer, register_mixer
from hf_memmix.swap import memory_mixers as mixers_of  # noqa: F401, the replaced attention modules by layer index

VOCAB = 99
LAYERS = 4

# options that make each mixer tiny, with few solver iterations; chunks are shorter than the prompts, so that prompts
# contain boundaries of chunks
MIXERS = {
    "gka": {"solver_phases": [8], "chunk_size": 8},
    # fewer slots than channels
    "lattice": {"slots": 6, "use_forget_gate": True},
    # without the output gate, which in a tiny random model is near zero, so the state would hardly change the output
    "coffee": {"states": 3, "inner_size": 48, "use_gate": False},
    # a rank below the head size, a chunk shorter than the prompts; a ridge at which fp32 gradients keep three digits
    "ska": {"rank": 6, "chunk_size": 4, "eps": 0.1},
    "gated_delta": {},
    # writes above 1, which turn what the memory holds into its opposite
    "kda": {"negative_eigenvalues": True},
    # two groups; few heads, as head h forgets at a rate of h, and states large enough to be heard beside D x
    "mamba2": {"state_size": 24, "head_dim": 32, "n_groups": 2, "chunk_size": 16},
    # not longer than the sliding windows of FAMILIES
    "window": {"window": 5},
    # a window beside a memory, in one layer: GKA under another name, whose option local_window is not 0
    "gka_beside_window": {"solver_phases": [8], "chunk_size": 8, "local_window": 4},
}
BESIDE = "gka_beside_window"


@register_mixer(BESIDE)
class GKABesideWindow(GKAMixer):
    """So that every test of every mixer also runs for `BesideWindow`."""


# the mixer of tests that are not about one mixer
DEFAULT_MIXER = "gka"

# families trained from scratch: fields that keep one tiny; layouts by further fields; presets with their layers,
# hidden size and stated number of parameters
MODELS = {
    "GKA": {
        "fields": {"num_key_value_heads": 4, "head_dim": 8, "mixers": {"gka": MIXERS["gka"]}},
        "layouts": {"pure": {}, "hybrid": {"attention_layers": [1]}},
        "presets": {
            "440m": (28, 1024, 0.44e9),
            "1b": (28, 1536, 1.0e9),
            "2.8b": (32, 2560, 2.8e9),
            "2.8b-hybrid": (30, 2560, 2.8e9),
        },
    },
    "Lattice": {
        "fields": {"mixers": {"lattice": MIXERS["lattice"]}},
        "layouts": {"pure": {}, "hybrid": {"attention_layers": [1]}},
        "presets": {"110m": (12, 768, 0.11e9), "340m": (24, 1024, 0.34e9)},
    },
    "Coffee": {
        "fields": {"mixers": {"coffee": {**MIXERS["coffee"], "use_output_filter": True}}},
        "layouts": {"pure": {}, "hybrid": {"attention_layers": [1]}},
        "presets": {"125m": (12, 768, 0.125e9), "400m": (24, 1024, 0.4e9), "1.5b": (24, 2048, 1.5e9)},
    },
    "Echo": {
        "fields": {"num_ska_layers": 1, "mixers": {name: MIXERS[name] for name in ("ska", "mamba2")}},
        "layouts": {
            "pure": {},
            "gated": {"feed_forward": "koopman_gated"},
            "ssm": {"num_ska_layers": 0, "feed_forward": "swiglu"},
            "hybrid": {"attention_layers": [1], "num_ska_layers": 0},
        },
        "presets": {"1m": (4, 128, 0.982e6), "50m": (12, 512, 0.05e9), "180m": (24, 768, 0.18e9)},
    },
}

# which of LAYERS layers the mixer replaces
LAYOUTS = {
    "first": (0,),
    "odd": (1, 3),
    "all": (0, 1, 2, 3),
}

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # generation in tests always runs to max_new_tokens
}
# in every layout that keeps attention, both kinds occur in kept and in replaced layers
_ALTERNATE = ["sliding_attention", "full_attention"] * (LAYERS // 2)

# model_type -> fields that differ from _SIZES; the comment names the property for which the family is tested
FAMILIES = {
    "llama": {"tie_word_embeddings": False},  # the simplest family
    "mistral": {"sliding_window": 7, "head_dim": 8},  # every attention layer slides
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": _ALTERNATE,
        "query_pre_attn_scalar": 16,
    },  # soft-caps
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "layer_types": _ALTERNATE},  # two rotary embeddings
    "gpt_neox": {"num_key_value_heads": None},  # fused per head, `attention`, `layer_past`
    "gpt2": {
        "n_embd": 32,
        "n_inner": 48,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": 256,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },  # Conv1D, `h[i].attn`, learned positions
    "cohere2": {"sliding_window": 5, "layer_types": _ALTERNATE, "logit_scale": 0.25},  # parallel block, NoPE layers
    "stablelm": {"use_qkv_bias": True},  # drops **kwargs
    "gpt_oss": {  # attention sinks, experts with biases
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": _ALTERNATE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
# their decoder and the caches of their attention work as those of a family above: `make test` runs fewer rows of them
ALIKE = {
    "qwen2": {"tie_word_embeddings": True},  # q, k, v biases
    "qwen3": {"head_dim": 16, "tie_word_embeddings": False},  # qk-norm, heads wider than hidden / heads
    "phi3": {"tie_word_embeddings": False},  # fused qkv_proj
    "olmo2": {},  # norms after the sublayers
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},  # scaled everywhere
    "nemotron": {},  # drops **kwargs, LayerNorm1P
    "starcoder2": {"use_bias": True},  # biases in every projection
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},  # NoPE layers
    "mixtral": {"num_local_experts": 4},  # mixture of experts
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}
FAMILIES |= ALIKE
# families whose native model does not separate packed sequences; if attention is kept, packed input is refused
NO_NATIVE_PACKING = {"gpt_oss"}


# ---- rows of tests over several tables


def in_turn(**tables):
    """Parametrize a test over tables: all combinations of the values of the first table, or of the first two of four;
    the values of the last two come in turn. Every two values of the four tables meet (`test_families.py` tests it).
    """
    values = [[*table] for table in tables.values()]
    leading = len(values) // 2
    rows = []
    for places in itertools.product(*(range(len(table)) for table in values[:leading])):
        turns = sum(places), places[0] + sum(places)  # so that the fourth table does not follow the third
        rows.append([table[place] for table, place in zip(values[:leading], places, strict=True)])
        rows[-1] += [table[turn % len(table)] for table, turn in zip(values[leading:], turns, strict=False)]
    return pytest.mark.parametrize([*tables], rows)


def one_each(**tables):
    """Parametrize a test over all combinations of the values of all tables.

    `make test` runs one row per value of the first table, with the combinations of the others in turn.
    """
    first, *others = ([*table] for table in tables.values())
    combinations = list(itertools.product(*others))
    rows = [
        pytest.param(value, *others, marks=() if place == i % len(combinations) else pytest.mark.product)
        for i, value in enumerate(first)
        for place, others in enumerate(combinations)
    ]
    return pytest.mark.parametrize([*tables], rows)


def every_third(names, rows):
    """Parametrize a test over `rows`; two of three have the marker `product`, so `make test` leaves them out."""
    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    marks = [() if i % 3 == 0 else pytest.mark.product for i in range(len(rows))]
    return pytest.mark.parametrize(names, [pytest.param(*row, marks=m) for row, m in zip(rows, marks, strict=True)])


# ---- models


def backbone_config(family, **overrides):
    """A tiny configuration of a native family."""
    fields = {k: v for k, v in {**_SIZES, **FAMILIES[family], **overrides}.items() if v is not None or "eos" in k}
    return AutoConfig.for_model(family, **fields)


def family_fields(name):
    """The fields of a tiny configuration of a family of MODELS."""
    return {**_SIZES, "num_hidden_layers": 3, **MODELS[name]["fields"]}


def mixer_types(layout, mixer=DEFAULT_MIXER, layers=LAYERS):
    """One entry per layer; `layout` is a name of LAYOUTS or the replaced layers' indices."""
    replaced = LAYOUTS.get(layout, layout) if isinstance(layout, str) else layout
    return [mixer if i in replaced else "attention" for i in range(layers)]


def tiny_config(family="llama", layout="first", mixer=DEFAULT_MIXER, options=None, **overrides):
    """The memmix configuration of a tiny native family."""
    backbone = backbone_config(family, **overrides)
    types = mixer_types(layout, mixer, backbone.num_hidden_layers)
    return hf_memmix.memmix_config(backbone, mixer_types=types, mixers={mixer: {**MIXERS[mixer], **(options or {})}})


@torch.no_grad()
def randomize(model, seed=0):
    """Draw all matrices again at unit gain. With transformers' std of 0.02, a wrong mixer would hardly change the
    logits.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            scale = parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        elif name.endswith(".bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def build(config, seed=0, dtype=torch.float32):
    """A random causal LM of a configuration, in evaluation mode."""
    torch.manual_seed(seed)
    # transformers' grouped matrix product of experts does not support float64
    eager = dtype == torch.float64 and hasattr(config, "num_experts_per_tok")
    experts = {"experts_implementation": "eager"} if eager else {}
    return randomize(AutoModelForCausalLM.from_config(config, **experts), seed).to(dtype).eval()


@functools.cache
def _tiny_model(family, layout, mixer, seed, dtype):
    config = backbone_config(family) if layout is None else tiny_config(family, layout, mixer)
    return build(config, seed, dtype)


def tiny_model(family="llama", layout="first", mixer=DEFAULT_MIXER, seed=0, fresh=False, dtype=torch.float64):
    """A tiny random causal LM; with `layout=None` the native model. Tests share it unless `fresh` is set."""
    model = _tiny_model(family, layout, mixer, seed, dtype)
    return copy.deepcopy(model) if fresh else model


def base_model(model):
    """The decoder below the head."""
    return getattr(model, model.base_model_prefix)


@functools.cache
def sliding_cache_records_one_forward():
    """Whether the sliding-window layer of this release of transformers records only one forward correctly.

    True for 5.17, where a draft model with sliding windows therefore fails, with or without mixers.
    """
    model = tiny_model("mistral", None)
    cache = model(random_ids(1, 3), use_cache=True).past_key_values
    cache.activate_past_recording()
    try:
        for _ in range(2):
            model(random_ids(1, 9), past_key_values=cache, use_cache=True)
    except RuntimeError:
        return True
    return False


def slides(model):
    """Whether a kept attention layer has a sliding window."""
    return any(model(random_ids(1, 2), use_cache=True).past_key_values.is_sliding)


def random_ids(batch, length, seed=0):
    """Token ids [batch, length], never the padding id."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def distinct_ids(batch, length, seed=0):
    """As `random_ids`, but no row contains a token twice.

    Equal tokens have equal keys in the first layer. SKA's gradient of the largest norm goes to one of several equal
    keys; which one depends on the rounding of a matrix product, so on the processor and the batch.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([3 + torch.randperm(VOCAB - 3, generator=generator)[:length] for _ in range(batch)])


def word_tokenizer(unknown="w2"):
    """A tokenizer whose words are w0, w1, ... for the ids of the tiny models; `unknown`: the word of id 2."""
    words = [unknown if i == 2 else f"w{i}" for i in range(VOCAB)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=unknown))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="w0", bos_token="w1", unk_token=unknown, padding_side="left"
    )


# ---- comparisons

# bounds of `difference`. These networks amplify rounding: at unit gain fp32 loses three digits. In float64 two correct
# runs differ by less than 1e-12, and a wrong run by more than 1e-6 (float64.py, test_controls.py)
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3}


def difference(actual, expected):
    """max |actual - expected| / max |expected|, after a shape and finiteness check."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), "not finite"
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def float32_noise(compute, embeddings, seeds=3):
    """The change of each tensor of compute(embeddings) by one rounding of the embeddings to float32: a list of floats.

    It bounds the effect of one part of a float64 model that transformers computes in float32. Every value changes by
    half a unit in the last place of float32, with a sign that is drawn for each value and seed.
    """
    exact, effects = compute(embeddings), []
    for seed in range(seeds):
        signs = torch.randint(0, 2, embeddings.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        moved = compute((embeddings * (1 + signs * 2.0**-24)).to(embeddings.dtype))
        effects.append([float(difference(a, b)) for a, b in zip(moved, exact, strict=True)])
    return [max(column) for column in zip(*effects, strict=True)]


def assert_same(actual, expected, what="", tolerance=None):
    """Both tensors are equal up to rounding, or exactly if the tolerance is 0."""
    error = difference(actual, expected)
    tolerance = TOLERANCES[expected.dtype] if tolerance is None else tolerance
    assert error <= tolerance, f"{what}: relative difference {error:.1e}, at most {tolerance:.0e} is allowed"


def assert_same_tokens(actual, expected, what=""):
    """Both lists of tokens are equal."""
    actual, expected = actual.tolist(), expected.tolist()
    assert actual == expected, f"{what}: tokens {actual}, expected {expected}"
