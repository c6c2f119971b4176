"""The recipe of CONTRIBUTING.md for mixers, feed-forwards and families, by throw-away ones of the unlike kind.

The mixer's state is no matrix a head: an elementwise one, which starts where it has learned to, and a count of tokens,
which an op that works in chunks of its own would need. Its parameters have other names than attention's.
"""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers import initialization as init

import hf_memmix
from hf_memmix.conversion import convert_model
from hf_memmix.mixers import MIXERS, AttentionShape, FeedForward, MemoryMixer, MixerOptions, register_mixer
from hf_memmix.models import FAMILIES, FamilyConfig, register_family
from house.checks import (
    CHECKS,
    assert_same_generation,
    check_assistant,
    check_gradient_checkpointing,
    check_padding,
    uncached_greedy,
)
from house.compiled import Graphs, bound_of_logits, compiled_generation
from testing import MIXERS as ROWS
from testing import assert_same, backbone_config, build, mixers_of, random_ids, randomize

PERIOD = 3


@dataclass
class LeakyOptions(MixerOptions):
    rate: float = 0.9

    def validate(self):
        if not 0 < self.rate < 1:
            raise ValueError(f"rate={self.rate} must be between 0 and 1")


class LeakyMixer(MemoryMixer):
    """h_t = rate h_{t-1} + u_t, h_0 learned; y_t = h_t, halved at every PERIOD-th token."""

    options_class = LeakyOptions
    fp32_parameters = ("start",)
    lora_targets = ("in_proj",)

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.hidden = AttentionShape.of(config).hidden_size
        self.in_proj = nn.Linear(self.hidden, self.hidden, bias=False)
        self.out_proj = nn.Linear(self.hidden, self.hidden, bias=False)
        self.start = nn.Parameter(torch.empty(self.hidden))

    def project(self, x, rotary):
        return {"u": self.in_proj(x)}

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        u = tokens["u"]
        if cu_seqlens is not None:
            parts = [self.scan({"u": part}, None)[0] for part in u.split(cu_seqlens.diff().tolist(), 1)]
            return torch.cat(parts, 1), {}
        if states is None:
            h, count = self.start.to(u.dtype).expand(len(u), -1), torch.zeros(len(u), dtype=torch.long)
        else:
            h, count = states["h"], states["count"]
        outputs = []
        for t in range(u.shape[1]):
            real = torch.ones(len(u), dtype=torch.bool) if lengths is None else t < lengths
            h = torch.where(real[:, None], self.options.rate * h + u[:, t], h)
            count = count + real.long()
            outputs.append(torch.where((count % PERIOD == 0)[:, None], 0.5 * h, h))
        return torch.stack(outputs, 1) if outputs else u, {"h": h, "count": count}

    def readout(self, y, x):
        return self.out_proj(y)

    def state_shapes(self, batch, dtype=torch.float32):
        return {"h": ((batch, self.hidden), dtype), "count": ((batch,), torch.long)}

    def init_weights(self):
        for projection in (self.in_proj, self.out_proj):
            init.normal_(projection.weight, std=0.02)
        init.normal_(self.start)


class Doubled(FeedForward):
    def __init__(self, hidden):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(hidden))

    def forward(self, x):
        return self.scale * x

    def init_weights(self):
        init.constant_(self.scale, 2.0)


class LeakyConfig(FamilyConfig, LlamaConfig):
    """GKA at the ends, the leaky mixer between, and no MLP."""

    model_type: ClassVar[str] = "memmix_leaky"
    presets: ClassVar[dict] = {"tiny": {"num_hidden_layers": 4}}

    def layer_mixers(self):
        return ["gka", *["leaky"] * (self.num_hidden_layers - 2), "gka"]

    def make_feed_forward(self, layer_idx):
        return Doubled(self.hidden_size)


@pytest.fixture(scope="module", autouse=True)
def registered():
    register_mixer("leaky")(LeakyMixer)
    register_family(LeakyConfig)
    yield
    del MIXERS["leaky"], FAMILIES["Leaky"]


def leaky_model(family="llama", types=("leaky", "attention", "gka", "leaky"), dtype=torch.float64):
    config = hf_memmix.memmix_config(backbone_config(family), mixer_types=types, mixers={"gka": ROWS["gka"]})
    model = build(config, dtype=dtype)
    for mixer in mixers_of(model).values():
        if isinstance(mixer, LeakyMixer):
            nn.init.normal_(mixer.start)
    return model


@pytest.fixture(scope="module")
def model(registered):
    return leaky_model()


@pytest.mark.parametrize("check", CHECKS)
def test_check(model, check):
    """Two kinds of memory and attention in one model."""
    CHECKS[check](model)


def test_further_checks(model):
    check_padding(model, kinds=("holes",))
    check_assistant(model, leaky_model("llama", ["leaky"] * 4))
    check_padding(leaky_model("stablelm", ["leaky"] * 4))
    check_gradient_checkpointing(leaky_model())


@pytest.mark.compiles
@torch.no_grad()
def test_static_decode_is_one_graph():
    torch._dynamo.reset()
    model, ids, graphs = leaky_model(), random_ids(1, 7), Graphs()
    out = compiled_generation(model, ids, graphs.backend(), new_tokens=8)
    assert_same_generation(out, uncached_greedy(model, ids, 8), "compiled", bound_of_logits(model))
    assert len(graphs) == 1


@torch.no_grad()
def test_learned_start(model):
    """It reaches the logits; a cache that was reset starts there again, a static one that is new too."""
    ids = random_ids(2, 6)
    expected = model(ids, use_cache=False).logits
    for length in (None, 20):
        cache = hf_memmix.RecurrentStateCache(model.config, max_cache_len=length)
        model._allocate_states(cache, 2) if length else None
        for _ in range(2):
            assert_same(model(ids, past_key_values=cache, use_cache=True).logits, expected)
            cache.reset()
    other = leaky_model()
    for mixer in mixers_of(other).values():
        if isinstance(mixer, LeakyMixer):
            mixer.start.zero_()
    assert (other(ids).logits - expected).abs().max() > 1e-3


@torch.no_grad()
def test_saved_state(model, tmp_path):
    ids = random_ids(1, 7)
    model(ids[:, :5], past_key_values=(cache := hf_memmix.RecurrentStateCache(model.config)))
    cache.save_pretrained(tmp_path)
    again = hf_memmix.RecurrentStateCache.from_pretrained(tmp_path, model.config)
    assert_same(model(ids[:, 5:], past_key_values=again).logits, model(ids).logits[:, 5:])


def test_start_stays_in_fp32(tmp_path):
    leaky_model(dtype=torch.float32).save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert mixers_of(half)[0].start.dtype == torch.float32
    assert mixers_of(half)[0].in_proj.weight.dtype == torch.bfloat16


def test_lora_finds_the_mixers_own_projections():
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(leaky_model(types=["leaky"] * 4), peft.LoraConfig())
    adapted = {name.split(".lora_A")[0].split(".")[-1] for name, _ in wrapped.named_parameters() if "lora_A" in name}
    assert adapted == {"in_proj"}


def test_conversion_is_refused():
    """The mixer has no `init_from_attention`."""
    teacher = AutoModelForCausalLM.from_config(backbone_config("llama"))
    with pytest.raises(ValueError, match=r"'leaky'.*from scratch"):
        convert_model(teacher, "leaky")


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"leaky.*rate=2"):
        hf_memmix.memmix_config(backbone_config("llama"), ["leaky"] * 4, {"leaky": {"rate": 2.0}})


@torch.no_grad()
def test_family(tmp_path):
    """Two mixers and another feed-forward, in a family of a few lines."""
    fields = {**backbone_config("llama").to_diff_dict(), "num_hidden_layers": 4, "mixers": {"gka": ROWS["gka"]}}
    fields.pop("model_type")
    config = LeakyConfig.preset("tiny", **fields)
    assert config.mixer_types == ["gka", "leaky", "leaky", "gka"]
    model = hf_memmix.models.LeakyForCausalLM(config).eval()
    assert all(torch.equal(layer.mlp.scale, torch.full((32,), 2.0)) for layer in model.model.layers)
    for layer in model.model.layers:
        layer.mlp.scale.normal_()
    randomize(model).save_pretrained(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is type(model)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same(again(random_ids(1, 7)).logits, model(random_ids(1, 7)).logits, tolerance=0)
    model = model.double()
    for check in ("splits", "static_cache", "crop"):
        CHECKS[check](model)


def test_registration_refuses():
    with pytest.raises(ValueError, match=r"LeakyMixer.*subclass|taken"):
        register_mixer("leaky")(LeakyMixer)
    with pytest.raises(ValueError, match="must subclass FamilyConfig"):
        register_family(LlamaConfig)
