"""GKAForCausalLM, the family that is trained from scratch: presets, sizes, and the same checks as everybody."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen3ForCausalLM

from hf_memmix import GKAConfig, GKAForCausalLM, GKAModel
from house.checks import CHECKS, check_assistant, check_gradient_checkpointing
from testing import MIXERS, assert_same, build, mixers_of, random_ids, randomize

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "mixers": MIXERS,
}


@pytest.fixture(scope="module", params=((), (1,)), ids=("pure", "hybrid"))
def model(request):
    config = GKAConfig(**TINY, attention_layers=list(request.param))
    return randomize(GKAForCausalLM(config)).double().eval()


@pytest.mark.parametrize("check", CHECKS)
def test_check(model, check):
    CHECKS[check](model)


def test_assistant(model):
    check_assistant(model, build(model.config, seed=1, dtype=torch.float64))


def test_gradient_checkpointing():
    check_gradient_checkpointing(build(GKAConfig(**TINY), dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "layers", "heads", "hidden"),
    [("440m", 28, 8, 1024), ("1b", 28, 12, 1536), ("2.8b", 32, 20, 2560), ("2.8b-hybrid", 30, 20, 2560)],
)
def test_presets(name, layers, heads, hidden):
    """Sizes of the paper; the number of parameters is near the name's."""
    config = GKAConfig.preset(name)
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (layers, heads, hidden)
    assert config.vocab_size == 50257
    attention = [i for i, kind in enumerate(config.mixer_types) if kind == "attention"]
    assert attention == ([6, 14, 22, 29] if "hybrid" in name else [])
    with torch.device("meta"):
        model = GKAForCausalLM(config)
    count = sum(p.numel() for p in model.parameters())
    stated = {"440m": 0.44e9, "1b": 1.0e9, "2.8b": 2.8e9, "2.8b-hybrid": 2.8e9}[name]
    assert 0.85 * stated < count < 1.2 * stated, f"{count / 1e9:.2f} B"


def test_preset_overrides():
    config = GKAConfig.preset("440m", **TINY)
    assert config.hidden_size == 32
    assert config.mixers["gka"]["num_iterations"] == 8
    assert GKAForCausalLM(config)(random_ids(1, 5)).logits.shape == (1, 5, 99)


def test_preset_refuses():
    with pytest.raises(ValueError, match=r"7b.*440m"):
        GKAConfig.preset("7b")
    with pytest.raises(ValueError, match=r"9.*3 layers"):
        GKAConfig(**TINY, attention_layers=[9])
    with pytest.raises(ValueError, match="gkaa"):
        GKAConfig(**TINY, mixer_types=["gkaa"] * 3)


def test_default_initialisation():
    """Fresh parameters follow the paper; loss of an untrained model is that of a uniform guess."""
    torch.manual_seed(0)
    model = GKAForCausalLM(GKAConfig(**TINY))
    mixer = mixers_of(model)[0]
    assert ((mixer.A_log.exp() > 0) & (mixer.A_log.exp() <= 16)).all()
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32
    ids = random_ids(4, 20)
    loss = model(input_ids=ids, labels=ids).loss
    assert abs(loss.item() - torch.tensor(99.0).log().item()) < 0.2


@torch.no_grad()
def test_files(tmp_path):
    """Own model type, own auto_map; loads through Auto and its own classes."""
    model = randomize(GKAForCausalLM(GKAConfig(**TINY, attention_layers=[1]))).eval()
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["model_type"] == "memmix_gka"
    assert isinstance(AutoConfig.from_pretrained(tmp_path), GKAConfig)
    ids = random_ids(1, 7)
    for kind in (AutoModelForCausalLM, GKAForCausalLM):
        again = kind.from_pretrained(tmp_path)
        assert type(again) is GKAForCausalLM
        assert isinstance(again, Qwen3ForCausalLM)
        assert_same(again(ids).logits, model(ids).logits, tolerance=0)
    for kind in (AutoModel, GKAModel):
        assert type(kind.from_pretrained(tmp_path)) is GKAModel
