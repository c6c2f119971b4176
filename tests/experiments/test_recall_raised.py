"""The longer training of the recall teacher's students: starts of their memories and predictions about them."""

import math

import pytest
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.from_attention.lattice import VALUE_SIZE
from hf_memmix.training.experiments.recall_teacher import grid, predictions, raised, students


@pytest.fixture(scope="module")
def tiny():
    return load_model(asset_path("tiny_teacher"), dtype=torch.float32).eval()


def test_gla_with_twice_the_heads_starts_as_gla_and_has_the_state_of_gka(tiny):
    ids = torch.arange(40)[None] + 100
    found = {}
    for name in ("gka", "gla", "gla-wide"):
        student = convert_model(tiny, name).float()
        for layer in student.config.memory_layers:
            students.START_DECAY[name](attention_module(student, layer), (64.0, 64.0))
        mixer = attention_module(student, 0)
        shapes = mixer.state_shapes(1)
        size = sum(math.prod(shape) for key, (shape, _) in shapes.items() if not key.startswith("conv"))
        with torch.no_grad():
            found[name] = student(ids, use_cache=False).logits, size
    torch.testing.assert_close(found["gla-wide"][0], found["gla"][0], atol=1e-4, rtol=1e-4)
    assert found["gla-wide"][1] == found["gka"][1] == 2 * found["gla"][1]


def test_slots_forget_half_of_their_content_in_the_half_lives_of_lattice(tiny):
    mixer = attention_module(convert_model(tiny, "lattice"), 0)
    students.START_DECAY["lattice"](mixer, (16.0, 4096.0))
    steps = mixer.gamma_proj.bias.detach().sigmoid()
    angles = (steps * VALUE_SIZE).square() / mixer.slots  # mean squares per token
    halves = 2 * math.log(2) / angles
    torch.testing.assert_close(halves[[0, -1]], torch.tensor([16.0, 4096.0]), rtol=1e-3, atol=0)
    assert raised.GATES.search("gamma_proj.bias") and not raised.GATES.search("g_proj.bias")


def test_an_unknown_layout_is_refused_before_anything_is_read(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(typer.BadParameter, match="'gka, short' is unknown; choose from .*gka, long"):
        raised.main(missing, missing, missing, layout="gka, short")


def test_predictions_about_the_longer_training():
    def cell(task, exact):
        return {"task": task, "length": 1024, "depth": 0.5, "answers": 40, "exact": exact}

    def run(layout, exact, kl=0.4):
        shares = [cell("niah", exact), cell("mqar_32", exact), cell("mqar", exact)]
        stages = {"align": {"tokens": 6e6}, "distill": {"tokens": 18e6}}
        return stages | {"recall": shares, "heldout_kl": kl, "settings": {"layout": layout}}

    runs = {"raised": run("gka, long", 0.96, 0.36), "raised_gla": run("gla, long", 0.82)}
    runs |= {"raised_gla_wide": run("gla-wide, long", 0.9), "raised_mamba2": run("mamba2, long", 0.4)}
    runs |= {"raised_seed1": run("gka, long", 0.86), "raised_long": run("gka, long", 0.98)}
    runs |= {"raised_gla_long": run("gla, long", 0.96), "raised_lattice": run("lattice, long", 0.5)}
    results = {"rows": [], "settings": {"layouts": list(grid.LAYOUTS)}, "environment": {"commit": "none"}}
    text = predictions.table(results, runs)
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()[2:]}
    assert "gla, long: needle 82; gla, long: MQAR, 32 pairs 82; MQAR, 32 pairs: gka, long 96, gla, long 82; " in text
    assert lines["21"].endswith("KL 0.360, 0.400 | right |")
    assert "gla-wide, long 90, gla, long 82; MQAR, 32 pairs: gka, long 96, gla-wide, long 90 | right |" in lines["22"]
    assert lines["23"].endswith("lattice, long: MQAR, 32 pairs 50 | 3 of 4 right |")
    assert "MQAR, 32 pairs 96 and 86 (missed)" in lines["24"]
    assert lines["25"].endswith("MQAR, full: 98 and 96 (missed) | 1 of 4 right |")


def test_twice_the_heads_cost_weights():
    shape = {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64}
    one = LlamaForCausalLM(LlamaConfig(vocab_size=8, intermediate_size=8, num_hidden_layers=1, **shape))
    counts = [sum(p.numel() for p in convert_model(one, name).parameters()) for name in ("gla", "gla-wide")]
    # the README: 31.7M weights where GLA has 24.5M
    assert round(12 * (counts[1] - counts[0]) / 1e6, 1) == 7.2
