"""The gated linear attention of the comparisons: GKA's block with a memory that is read without a solver."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_memmix import memmix_config
from hf_memmix.mixers import GKAOptions
from hf_memmix.swap import memory_mixers
from hf_memmix.training.experiments.common.baselines import GLAOptions


def model(mixer: str, **options):
    backbone = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
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


@pytest.mark.parametrize("split", [1, 7])
def test_a_split_sequence_is_the_whole(split):
    gla = model("gla").double().eval()
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = gla(ids).logits
        first = gla(ids[:, :split], use_cache=True)
        rest = gla(ids[:, split:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, rtol=1e-9, atol=1e-9)
    assert all("H" not in layer.get() for layer in rest.past_key_values.layers)
