"""Measurements that tests/core/test_tensor_parallel.py compares between one process and several, which call `main`.

Every folder holds a saved model, and perhaps a LoRA adapter for it in `adapter`; rank 0 writes `measured.pt` and the
saved model `again` beside it.
"""

import os
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_memmix  # noqa: F401
from float64 import library_in_float64
from hf_memmix.tensor_parallel import whole_tensors
from testing import random_ids

NEW_TOKENS = 5
ADAPTER = "adapter"


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [2, 19] and a mask that pads the first row."""
    ids = random_ids(2, 19)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids, mask


def measure(model) -> dict[str, torch.Tensor]:
    """Outputs of a model by name: of a forward, of all kinds of generation, and of one training step."""
    ids, mask = batch()
    found = {}

    def generate(name, ids, **kwargs):
        out = model.generate(
            ids,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **kwargs,
        )
        found[f"{name}, tokens"], found[f"{name}, logits"] = out.sequences, torch.stack(out.logits, 1)

    with torch.no_grad():
        found["logits"] = model(ids, attention_mask=mask, use_cache=False).logits
        packed = torch.tensor([0, 7, 19, 38], dtype=torch.int32)
        found["packed"] = model(ids.reshape(1, -1), cu_seq_lens_q=packed, use_cache=False).logits
    generate("dynamic", ids, attention_mask=mask)
    generate("static", ids, attention_mask=mask, cache_implementation="static", disable_compile=True)
    generate("beams", ids, attention_mask=mask, num_beams=2)
    repeated = torch.cat([ids[1:, :9], ids[1:, :9]], 1)
    generate("prompt lookup", repeated, attention_mask=torch.ones_like(repeated), prompt_lookup_num_tokens=3)
    model.train()
    found["loss"] = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
    found["loss"].backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"gradient of {name}": gradient for name, gradient in whole_tensors(model, gradients).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    model.eval()
    with torch.no_grad():
        found["logits after a step"] = model(ids, attention_mask=mask, use_cache=False).logits
    return {name: tensor.detach() for name, tensor in found.items()}


def load(folder, **kwargs):
    """The saved model, in the dtype of its file."""
    has_experts = hasattr(AutoConfig.from_pretrained(folder), "num_experts_per_tok")
    # transformers' grouped matrix product of experts does not support float64
    experts = {"experts_implementation": "eager"} if has_experts else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **experts, **kwargs)


def run(folder: Path) -> dict:
    """The measurements of the model in a folder, divided over all processes, or the text of the error."""
    ranks = int(os.environ["WORLD_SIZE"])
    try:
        model = load(folder, distributed_config=DistributedConfig(tp_size=ranks))
        if (folder / ADAPTER).exists():
            model = PeftModel.from_pretrained(model, folder / ADAPTER)
        found = measure(model)
    except ValueError as error:
        return {"error": str(error)}
    model.save_pretrained(folder / "again")
    # the older argument for tensor parallelism
    model, ids, mask = load(folder, tp_plan="auto", tp_size=ranks), *batch()
    with torch.no_grad():
        return found | {"logits by tp_plan": model(ids, attention_mask=mask, use_cache=False).logits}


def main(folders: list[str]):
    """In every rank of a launch."""
    torch.set_num_threads(1)
    for folder in map(Path, folders):
        with library_in_float64():
            found = run(folder)
        if os.environ["RANK"] == "0":
            torch.save(found, folder / "measured.pt")
    torch.distributed.destroy_process_group()
