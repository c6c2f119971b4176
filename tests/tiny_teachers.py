"""Tiny random teachers of every family in the conversion table."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MULTI_HEAD = {"gpt2", "gpt_neox"}  # families without grouped keys


def tiny_teacher(model_type="llama", layers=3, seed=0, vocab_size=64, **overrides):
    """A causal LM of a few thousand parameters with no zero biases and no unit norms, so that nothing hides."""
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
    if model_type in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe"):
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
