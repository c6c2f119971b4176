"""The recipe of CONTRIBUTING.md by throw-away ones of the unlike kind: op, mixer, start, card; feed-forward; family.

The mixer's state is no matrix a head: an elementwise one, which starts where it has learned to, and a count of tokens,
which an op that works in chunks of its own would need. Its parameters have other names than attention's.
"""

from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers import initialization as init

import hf_memmix
from core.checks import (
    CHECKS,
    check_assistant,
    check_gradient_checkpointing,
    check_padding,
)
from hf_memmix.conversion import TensorFate, convert_model, report, save_student, starts
from hf_memmix.conversion.from_attention import STARTS
from hf_memmix.mixers import (
    MIXERS,
    AttentionShape,
    FeedForward,
    MemoryMixer,
    MixerOptions,
    mixer_options,
    pages,
    register_mixer,
)
from hf_memmix.mixers.options import between
from hf_memmix.models import FAMILIES, FamilyConfig, register_family
from hf_memmix.training import card
from testing import MIXERS as ROWS
from testing import assert_same, backbone_config, build, every_third, mixers_of, random_ids, randomize

PERIOD = 3


@mixer_options
class LeakyOptions(MixerOptions):
    rate: float = between(0.9, 0.01, 0.99)
    halve: bool = True

    def validate_halving(self):
        if self.halve and self.rate < 0.1:
            raise ValueError(f"halve=True forgets all at rate={self.rate}; take at least 0.1")


# ---- the op


def leaky(u, rate, real, h):
    """h_t = rate h_{t-1} + u_t, and h_t = h_{t-1} at tokens that are not real: h [B, T, D] and the last one.

    u [B, T, D], real [B, T] of bool, h [B, D].
    """
    outputs = []
    for t in range(u.shape[1]):
        h = torch.where(real[:, t, None], rate * h + u[:, t], h)
        outputs.append(h)
    return torch.stack(outputs, 1) if outputs else u, h


# ---- the mixer


class LeakyMixer(MemoryMixer):
    """h_t = rate h_{t-1} + u_t, h_0 learned; y_t = h_t, halved at every PERIOD-th token."""

    summary = "A leaky average: rate^age of every value"
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
        states = states or self.initial_states(
            len(u) if cu_seqlens is None else len(cu_seqlens) - 1, u.device, u.dtype
        )
        if cu_seqlens is not None:
            parts = []
            for n, part in enumerate(u.split(cu_seqlens.diff().tolist(), 1)):
                parts.append(self.scan({"u": part}, {name: state[n : n + 1] for name, state in states.items()}))
            ends = {name: torch.cat([end[name] for _, end in parts]) for name in states}
            return torch.cat([y for y, _ in parts], 1), ends
        h, count = states["h"], states["count"]
        at = torch.arange(u.shape[1])[None]
        real = (at >= 0).expand(len(u), -1) if lengths is None else at < lengths[:, None]
        y, h = leaky(u, self.options.rate, real, h)
        counts = count[:, None] + real.cumsum(1)
        y = torch.where((counts % PERIOD == 0)[..., None], 0.5 * y, y)
        return y, {"h": h, "count": count + real.sum(1)}

    def initial_states(self, batch, device, dtype):
        start = self.start.to(device, dtype).expand(batch, -1)
        return {"h": start, "count": torch.zeros(batch, dtype=torch.long, device=device)}

    def readout(self, y, x, tokens=None):
        return self.out_proj(y)

    def state_shapes(self, batch, dtype=torch.float32):
        return {"h": ((batch, self.hidden), dtype), "count": ((batch,), torch.long)}

    def init_weights(self):
        for projection in (self.in_proj, self.out_proj):
            init.normal_(projection.weight, std=0.02)
        init.normal_(self.start)


# ---- its start from attention


def take_over(mixer, attention):
    """Values and output of the attention; h starts at zero. Biases have no place."""
    fates = []
    for field, tensor in attention.tensors().items():
        if field == "v_weight":
            heads = tensor.unflatten(0, (attention.num_kv_heads, -1))
            heads = heads.repeat_interleave(attention.num_heads // attention.num_kv_heads, 0)
            mixer.in_proj.weight.copy_(heads.flatten(0, 1))
            fates.append(TensorFate(field, "transformed", ("in_proj.weight",), "one head for each query head"))
        elif field == "o_weight":
            mixer.out_proj.weight.copy_(tensor)
            fates.append(TensorFate(field, "used", ("out_proj.weight",)))
        elif field.startswith(("q_", "k_")):
            fates.append(TensorFate(field, "dropped", reason="a leaky average has no scores"))
        else:
            raise ValueError(f"the attention's {field} has no place in a leaky layer; keep this layer as attention")
    mixer.start.zero_()
    return fates


@pytest.fixture
def with_start():
    starts("leaky", options=lambda attention: {"rate": 0.5})(take_over)
    yield
    del STARTS["leaky"]


# ---- a feed-forward and a family


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


@every_third("check", CHECKS)
def test_check(model, check):
    """Two kinds of mixers and attention in one model."""
    CHECKS[check](model)


def test_further_checks(model):
    check_padding(model, kinds=("holes",))
    check_assistant(model, leaky_model("llama", ["leaky"] * 4))
    check_padding(leaky_model("stablelm", ["leaky"] * 4))
    check_gradient_checkpointing(leaky_model())


@torch.no_grad()
def test_learned_start(model):
    """A learned initial state changes the logits; a cache after reset(), and a new static cache, start from it."""
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
def test_conversion(with_start):
    """The layer is the leaky average of the attention's values, and the user's options come last."""
    teacher = AutoModelForCausalLM.from_config(backbone_config("llama")).double()
    student = convert_model(teacher, "leaky", keep=[3])
    attention, mixer = teacher.model.layers[1].self_attn, mixers_of(student)[1]
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    v = attention.v_proj(x).unflatten(-1, (2, 8)).repeat_interleave(2, 2).flatten(2)
    expected = leaky(v, 0.5, torch.ones(1, 5).bool(), torch.zeros(1, 32, dtype=torch.float64))[0]
    expected[:, PERIOD - 1] /= 2
    assert_same(mixer(x)[0], attention.o_proj(expected))
    assert student.conversion_report.counts()["dropped"] == 3 * 2
    assert convert_model(teacher, "leaky", keep=[3], rate=0.7).config.mixers["leaky"]["rate"] == 0.7
    biased = AutoModelForCausalLM.from_config(backbone_config("qwen2"))
    with pytest.raises(ValueError, match="v_bias has no place in a leaky layer"):
        convert_model(biased, "leaky")


def test_card(with_start, tmp_path):
    teacher = AutoModelForCausalLM.from_config(backbone_config("llama"))
    student = convert_model(teacher, "leaky", keep=[3])
    save_student(student, tmp_path)
    measured = report(student, teacher, random_ids(1, 60)[0], block_size=30)
    where = {"hardware": "a CPU", "torch": "2", "transformers": "5"}
    measured |= {"environment": where, "text": [{"file": "text", "sha256": ""}], "block_size": 30}
    text = card.student_card(tmp_path, measured, base_model="me/llama", license="mit")
    assert "- A leaky average: rate^age of every value." in text and "remains in layer 3" in text
    (tmp_path / "README.md").write_text(text)
    assert "leaky" in card.check_card(tmp_path).data.tags


def test_refusals():
    """A mixer without a start, and options that are wrong or do not go together."""
    with pytest.raises(ValueError, match=r"'leaky'.*from scratch"):
        convert_model(AutoModelForCausalLM.from_config(backbone_config("llama")), "leaky")
    for options, match in (({"rate": 2.0}, "rate=2.0 must be"), ({"rate": 0.05}, "halve=True forgets")):
        with pytest.raises(ValueError, match=f"leaky.*{match}"):
            hf_memmix.memmix_config(backbone_config("llama"), ["leaky"] * 4, {"leaky": options})


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


class OwnStep(LeakyMixer):
    """With a step that knows nothing about pages."""

    def step(self, tokens, states):
        y, new = self.scan(tokens, states)
        for name, state in states.items():
            state.copy_(new[name])
        return y


@pytest.fixture
def own_step():
    register_mixer("own_step")(OwnStep)
    yield OwnStep
    del MIXERS["own_step"]


@torch.no_grad()
def test_pages_need_no_code_of_the_mixer(own_step):
    """Without a step, and with one that has no `state_indices`: pages are copied out and back; new ones start anew."""
    config = hf_memmix.memmix_config(backbone_config("llama"), ["leaky"] * 4)
    for cls in (LeakyMixer, own_step):
        mixer = cls(config, 0).double()
        mixer.init_weights()
        x = torch.randn(3, 5, 32, dtype=torch.float64)
        tokens = mixer.project_rows(x)
        want, _ = mixer.scan(tokens, None)
        shapes = mixer.state_shapes(1, torch.float64)
        memory = torch.full((6, pages.page_layout(shapes)[1]), 255, dtype=torch.uint8)
        pools, indices = pages.carve(memory, shapes), torch.tensor([4, 0, 3], dtype=torch.int32)
        flat = {"u": tokens["u"][:, :3].reshape(1, 9, -1)}
        bounds, anew = torch.tensor([0, 3, 6, 9]), torch.ones(3, dtype=torch.bool)
        first, _ = mixer.scan_sequences(flat, pools, bounds, anew, indices)
        rest = [mixer.step({"u": tokens["u"][:, t : t + 1]}, pools, indices) for t in (3, 4)]
        assert_same(torch.cat([first.view(3, 3, -1), *rest], 1), want)
        assert (memory[[1, 2, 5]] == 255).all()


def test_registration_refuses():
    with pytest.raises(ValueError, match=r"LeakyMixer.*subclass|taken"):
        register_mixer("leaky")(LeakyMixer)
    unchecked = type("Unchecked", (LeakyMixer,), {"options_class": type("Options", (LeakyOptions,), {})})
    with pytest.raises(ValueError, match="Unchecked are not checked"):
        register_mixer("unchecked")(unchecked)
    old = type("Old", (LeakyMixer,), {"readout": lambda self, y, x: self.out_proj(y)})
    with pytest.raises(ValueError, match=r"Old.readout\(self, y, x\) .*write readout\(self, y, x, tokens=None\)"):
        register_mixer("old")(old)
    with pytest.raises(ValueError, match="must subclass FamilyConfig"):
        register_family(LlamaConfig)
