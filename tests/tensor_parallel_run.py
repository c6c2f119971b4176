"""What tests/core/test_tensor_parallel.py compares: one process against two. Also the program that the two run.

    python -m torch.distributed.run --nproc-per-node 2 tensor_parallel_run.py FOLDER...

Every folder holds a saved model; rank 0 writes `measured.pt` and the saved model `again` beside it.
"""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_memmix  # noqa: F401
from float64 import library_in_float64
from hf_memmix.tensor_parallel import whole_tensors
from testing import random_ids

NEW_TOKENS = 5


def measure(model) -> dict[str, torch.Tensor]:
    """Outputs of a model by name: forward, all ways to generate, and one training step."""
    ids = random_ids(2, 19)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
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


def main(folders: list[str]):
    torch.set_num_threads(1)
    with library_in_float64():
        _run(folders)
    torch.distributed.destroy_process_group()


def _run(folders):
    for folder in map(Path, folders):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", distributed_config=DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))
            )
            found = measure(model)
            model.save_pretrained(folder / "again")
        except ValueError as error:
            found = {"error": str(error)}
        if os.environ["RANK"] == "0":
            torch.save(found, folder / "measured.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
