"""The layers of a teacher that are read one by one: what they compute, and how many are in memory."""

import itertools

import pytest
import torch

from hf_memmix.conversion import load_model
from hf_memmix.conversion.families import FAMILIES, decoder_layers
from hf_memmix.training.streaming.teacher import StreamedTeacher
from testing import every_third
from tiny_teachers import tiny_teacher

IDS = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))
DTYPES = (torch.float32, torch.bfloat16)
PACKED = torch.cat([torch.arange(6), torch.arange(10)]).repeat(2, 1)


@every_third(("family", "dtype"), list(zip(sorted(FAMILIES), itertools.cycle(DTYPES), strict=False)))
def test_layers_one_by_one_compute_what_the_whole_teacher_does(tmp_path, family, dtype):
    tiny_teacher(family, 3).to(dtype).save_pretrained(tmp_path)
    whole, streamed = load_model(tmp_path), StreamedTeacher(tmp_path, "cpu")
    for positions in (None, PACKED):
        seen = []

        def keep(module, args, kwargs, output, seen=seen):
            seen.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], output))

        handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in decoder_layers(whole)]
        with torch.no_grad():
            whole.base_model(input_ids=IDS, position_ids=positions, use_cache=False)
        for handle in handles:
            handle.remove()
        with streamed.embeddings():
            hidden = streamed.embed(IDS, positions)
        assert len(seen) == 3 and torch.equal(hidden, seen[0][0])
        for layer, (_, expected) in enumerate(seen):
            with streamed.layer(layer):
                hidden = streamed.advance(layer, hidden, IDS, positions)
            assert hidden.dtype == expected.dtype and torch.equal(hidden, expected)


def test_one_layer_and_no_other_has_weights(tmp_path):
    model = tiny_teacher("llama", 3)
    model.save_pretrained(tmp_path)
    teacher = StreamedTeacher(tmp_path, "cpu")
    norm = model.model.norm.weight.numel()
    assert teacher.resident_parameters() == norm
    with teacher.embeddings():
        assert teacher.resident_parameters() == norm + model.model.embed_tokens.weight.numel()
    for index, layer in enumerate(model.model.layers):
        with teacher.layer(index):
            assert teacher.resident_parameters() == norm + sum(p.numel() for p in layer.parameters())
    assert teacher.resident_parameters() == norm


def test_a_layer_that_gets_more_than_hidden_states_is_refused(tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    native = LlamaRotaryEmbedding.forward
    tiny_teacher("llama", 3).save_pretrained(tmp_path)
    monkeypatch.setattr(
        LlamaRotaryEmbedding, "forward",
        lambda self, x, position_ids: tuple(part + x.mean() for part in native(self, x, position_ids)),
    )  # fmt: skip
    with pytest.raises(ValueError, match="'llama' .* without --stream"):
        StreamedTeacher(tmp_path, "cpu")
