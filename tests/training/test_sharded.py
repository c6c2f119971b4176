"""The weights of a pair as a state dict of the plain student, and back."""

import pytest
import torch

from hf_memmix.conversion import convert_model
from hf_memmix.training import sharded
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.train import make_pair
from tiny_teachers import tiny_teacher


@pytest.mark.parametrize("stage", ["align", "distill"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_what_is_written_is_what_is_read(family, stage):
    """Tied tensors are written once, as a checkpoint has them."""
    teacher = tiny_teacher(family, layers=2, tie_word_embeddings=True)
    pair, other = (make_pair(convert_model(teacher, "gka"), teacher, Recipe(stage=stage)) for _ in range(2))
    with torch.no_grad():
        for parameter in pair.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    state = sharded.student_state(pair, pair.state_dict())
    assert "lm_head.weight" not in state and "model.embed_tokens.weight" in state
    state = {name: tensor.clone() for name, tensor in state.items()}
    sharded.load(other, state)
    for name, tensor in pair.plain_student.state_dict().items():
        assert torch.equal(tensor, other.plain_student.state_dict()[name]), name
    del state["model.layers.0.self_attn.q_proj.weight"]
    with pytest.raises(ValueError, match="the checkpoint has no model.layers.0.self_attn.q_proj.weight"):
        sharded.load(other, state)
