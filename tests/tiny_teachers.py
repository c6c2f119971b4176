"""Tiny random teachers of every family in the conversion table, a tokenizer and a text for them."""

import functools
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_memmix.conversion.families import extract_attention
from hf_memmix.conversion.from_attention import STARTS
from testing import MIXERS as ROWS

# mixers of the package; STARTS also has those of experiments whose tests were collected before
CONVERTIBLE = [name for name in ROWS if name in STARTS]

MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
MIXTURES = {
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
}
MIXTURES |= {"hunyuan_v1_moe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open"}
MULTI_HEAD = {"biogpt", "gpt2", "gpt_neox"}  # families without grouped keys


def tiny_teacher(model_type="llama", layers=3, seed=0, vocab_size=64, **overrides):
    """A causal LM of a few thousand parameters. No bias is zero and no norm is one, so a lost tensor changes the
    output.
    """
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if model_type in MULTI_HEAD else 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if model_type == "gpt2":
        fields = {"vocab_size": vocab_size, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 256}
        fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if model_type in MIXTURES:
        fields |= MOE
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(fields | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.ndim == 2:
                parameter.mul_(4)
    return model.eval()


@functools.cache
def rotating_mixers():
    """The mixers whose start from a rotary attention asks for rotary embeddings, by name."""
    attention = extract_attention(tiny_teacher("llama", layers=1), 0)
    return [name for name in CONVERTIBLE if STARTS[name].options(attention).get("use_rope")]


WORDS = "the cat dog sat ran on to a mat sea and of in he said earth heaven light day night".split()  # noqa: SIM905


def tiny_tokenizer():
    """A word-level tokenizer of the vocabulary size of `tiny_teacher`, with end-of-sequence and unknown tokens."""
    vocab = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def bos_tokenizer():
    """`tiny_tokenizer`, which puts <s> before a text, as the tokenizers of Gemma and Llama 3 do."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


# turns as the templates of SmolLM2 and Qwen write them; MARKED tells which tokens are answers
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}" + PROMPT
)
MARKED = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}
{{- m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}"""
MARKED += PROMPT


def chat_tokenizer(template=CHAT):
    """A tokenizer of bytes with a chat template, for models with a vocabulary of 300."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocab | {"Ġt": 259, "he": 260}, [("Ġ", "t"), ("h", "e")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<|endoftext|>", **names)
    tokenizer.chat_template = template
    return tokenizer


def tiny_text(words=4000, seed=0):
    """Text that a small model can learn: words drawn from a fixed random chain."""
    generator = random.Random(seed)
    follow = {word: random.Random(word).sample(WORDS, 3) for word in WORDS}
    word, text = "the", []
    for _ in range(words):
        text.append(word)
        word = generator.choice(follow[word])
    return " ".join(text) + "\n"


def positions_of(lengths, block_size):
    """Position ids [rows, block_size] of joined documents of these lengths. Tokens that fill no row are left out."""
    stream = torch.cat([torch.arange(length) for length in lengths])
    rows = stream[: len(stream) // block_size * block_size].view(-1, block_size).clone()
    # a document that continues from the row before starts at 0 again
    carried = (rows == 0).cumsum(1) == 0
    return torch.where(carried, torch.arange(block_size), rows)
