"""A GGUF file becomes an ordinary teacher: its weights, its tokenizer and its chat template."""

import json

import pytest
import torch

from cli_runner import memmix, result_of
from hf_memmix.conversion import load_model
from tiny_teachers import CHAT, chat_tokenizer, tiny_teacher

gguf = pytest.importorskip("gguf")
Q8 = gguf.GGMLQuantizationType.Q8_0
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_gguf(file, model, tokenizer):
    """As llama.cpp writes a Llama: heads of queries and keys interleaved, matrices in 8 bits where rows allow it."""
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(backend["vocab"], key=backend["vocab"].get)
    tokens += [f"<|unused{i}|>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in backend["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(CHAT)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for i in range(config.num_hidden_layers):
        names |= {f"blk.{i}.{theirs}": f"model.layers.{i}.{ours}" for theirs, ours in LAYER.items()}
    for theirs, ours in names.items():
        tensor = state[f"{ours}.weight"]
        if theirs.endswith(("attn_q", "attn_k")):
            tensor = tensor.view(-1, 2, config.head_dim // 2, config.hidden_size).transpose(1, 2).reshape(tensor.shape)
        values = tensor.contiguous().numpy()
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(f"{theirs}.weight", gguf.quants.quantize(values, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(f"{theirs}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def file(tmp_path):
    (tmp_path / "models").mkdir()
    write_gguf(tmp_path / "models" / "tiny.gguf", tiny_teacher("llama", vocab_size=300), chat_tokenizer())
    return tmp_path / "models" / "tiny.gguf"


@torch.no_grad()
def test_the_folder_is_a_teacher_that_computes_what_the_file_holds(file, tmp_path):
    result = result_of(memmix("import-gguf", file.parent, tmp_path / "teacher", "--dtype", "float32", "--json"))
    assert result["model_type"] == "llama" and result["dtype"] == "float32"
    ours, original = load_model(tmp_path / "teacher"), tiny_teacher("llama", vocab_size=300)
    assert result["parameters"] == original.num_parameters()
    ids = torch.arange(3, 60)[None]
    got, want = (model(ids).logits for model in (ours, original))
    assert (got - want).norm() < 0.05 * want.norm()  # 8 bits
    swapped = tiny_teacher("llama", vocab_size=300)  # what an order of the heads that is not undone would give
    swapped.model.layers[0].self_attn.q_proj.weight.copy_(ours.model.layers[0].self_attn.q_proj.weight.roll(1, 0))
    assert (swapped(ids).logits - want).norm() > 0.05 * want.norm()
    run = ["--teacher", tmp_path / "teacher", "--keep-layers", "1", "--out", tmp_path / "student", "--json"]
    assert result_of(memmix("convert", *run))["kept"] == [1]
    chat = ["--model", tmp_path / "student", "--chat", "--prompt", "who?", "--max-new-tokens", "3", "--json"]
    assert result_of(memmix("generate", *chat))["messages"][0] == {"role": "user", "content": "who?"}


def test_the_tokenizer_is_that_of_the_file(file, tmp_path):
    from transformers import AutoTokenizer

    assert memmix("import-gguf", file, tmp_path / "teacher").exit_code == 0
    ours, original = AutoTokenizer.from_pretrained(tmp_path / "teacher"), chat_tokenizer()
    messages = [{"role": "user", "content": "the cat and he"}]
    assert ours.apply_chat_template(messages, tokenize=False) == original.apply_chat_template(messages, tokenize=False)
    assert ours.encode("the cat and he", add_special_tokens=False) == original.encode("the cat and he")
    assert ours.eos_token == "<|im_end|>"


def test_files_that_are_refused(file, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:3000])
    part = tmp_path / "tiny-00001-of-00002.gguf"
    part.write_bytes(file.read_bytes())
    (file.parent / "other.gguf").write_bytes(file.read_bytes())
    for given, named in ((broken, "broken.gguf"), (part, "gguf-split"), (file.parent, "other.gguf")):
        run = memmix("import-gguf", given, tmp_path / "out")
        assert run.exit_code == 1 and named in run.output and "Traceback" not in run.output
        assert not (tmp_path / "out").exists()
