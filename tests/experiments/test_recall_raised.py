"""The longer training of the recall teacher's students: starts of their memories and predictions about them."""

import math

import pytest
import torch

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.from_attention.lattice import VALUE_SIZE
from hf_memmix.training.experiments.recall_teacher import raised, students


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
