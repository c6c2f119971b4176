"""Compares tensor parallelism on several GPUs with one GPU: greedy tokens and milliseconds per token.

    python -m torch.distributed.run --standalone --nproc-per-node 2 kernels/benchmarks/benchmark_tensor_parallel.py \
        --out kernels/benchmarks/results/tensor_parallel_h200.json

The model is a Llama of 1B parameters with random weights and a memory mixer in every layer. Rank 0 runs it alone
first, then all ranks run it together. The tokens are compared in fp32, because there the other order of summation
rarely changes the greedy choice, and in bf16, where it often does. For each row whose tokens differ, "near_ties" says
what the logits of the same weights in fp32 are at the first such token: if the two choices are closer there than the
errors of both runs together, it is a near tie ("is_near_tie"). The time is measured in all the ways of `WAYS`. The
file is written after each measurement. On NVIDIA GPUs that other programs share, set NCCL_NVLS_ENABLE=0. `--tiny` runs
a small shape on a CPU (gloo).
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from llama import SHAPE, TokenTimer
from transformers import AutoModelForCausalLM, LlamaConfig, StoppingCriteriaList
from transformers.distributed import DistributedConfig

import hf_memmix
from hf_memmix import launch

TINY = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "tie_word_embeddings": True,
}  # fmt: skip


# dtype and cache of the measurements; on a GPU, a static cache compiles
WAYS = {
    "float32": (torch.float32, "dynamic"),
    "bfloat16": (torch.bfloat16, "dynamic"),
    "bfloat16_static": (torch.bfloat16, "static"),
}


def save_model(folder: Path, mixer: str, shape: dict, device: str):
    """Save a model of the shape with random fp32 weights and a memory mixer in every layer."""
    config = LlamaConfig(**shape, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    config = hf_memmix.memmix_config(config, mixer_types=[mixer] * config.num_hidden_layers)
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def measure(model, prompt, new_tokens: int, cache: str) -> dict:
    """The greedy tokens [B, T], their logits [B, T, vocabulary], and the median time per token after the first quarter
    of them.
    """
    timer = TokenTimer()
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        cache_implementation=None if cache == "dynamic" else cache,
        stopping_criteria=StoppingCriteriaList([timer]),
        output_logits=True,
        return_dict_in_generate=True,
    )
    steps = [1e3 * (b - a) for a, b in zip(timer.times, timer.times[1:], strict=False)][new_tokens // 4 :]
    tokens, logits = out.sequences[:, prompt.shape[1] :].cpu(), torch.stack(out.logits, 1).float().cpu()
    return {"tokens": tokens, "logits": logits, "ms_per_token": round(statistics.median(steps), 3)}


@torch.inference_mode()
def exact_logits(model, prompt, tokens):
    """The logits [B, T, vocabulary] that the tokens [B, T] are chosen by, with the model's weights moved to fp32."""
    ids = torch.cat([prompt, tokens[:, :-1].to(prompt.device)], 1)
    return model.float()(ids, use_cache=False, logits_to_keep=tokens.shape[1]).logits.cpu()


def near_ties(alone: dict, together: dict) -> list[dict]:
    """For each row whose tokens differ: the first such token, the gap between the exact logits of the two choices, and
    the largest errors of the logits of both runs there. Up to this token both have read the same.
    """
    found = []
    for row, (a, b) in enumerate(zip(alone["tokens"], together["tokens"], strict=True)):
        if (a != b).any():
            first = int((a != b).int().argmax())
            exact = alone["exact"][row, first]
            gap = abs(float(exact[a[first]] - exact[b[first]]))
            errors = [float((run["logits"][row, first] - exact).abs().max()) for run in (alone, together)]
            found.append(
                {
                    "row": row,
                    "token": first,
                    "exact_gap": round(gap, 5),
                    "largest_error": dict(zip(("alone", "together"), (round(e, 5) for e in errors), strict=True)),
                    "is_near_tie": gap <= sum(errors),
                }
            )
    return found


def run(folder, args, device, dtype, cache: str, distributed: bool) -> dict:
    """Measure the model in `folder`, on this process alone or on all processes together."""
    # tensor parallelism moves the weights to the devices itself
    where = {"distributed_config": DistributedConfig(tp_size=dist.get_world_size())} if distributed else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where)
    model = model if distributed else model.to(device)
    prompt = torch.randint(
        3, model.config.vocab_size, (args.batch, args.context), generator=torch.Generator().manual_seed(1)
    )
    found = measure(model, prompt.to(device), args.new_tokens, cache)
    found["weight_bytes"] = sum(
        getattr(p, "to_local", lambda p=p: p)().numel() * p.element_size() for p in model.parameters()
    )
    if not distributed:
        found["exact"] = exact_logits(model, prompt.to(device), found["tokens"])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixer", default="gka")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--commit", default="unknown", help="commit to record")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    first, ranks = launch.is_first(), launch.processes()
    device = f"cuda:{launch.local_rank()}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    box = [tempfile.mkdtemp() if first else None]
    dist.broadcast_object_list(box)
    folder = Path(box[0])
    shape = TINY if args.tiny else SHAPE
    if first:
        save_model(folder, args.mixer, shape, device)
    dist.barrier()

    record = {
        "mixer": args.mixer,
        "shape": shape,
        "batch": args.batch,
        "context": args.context,
        "new_tokens": args.new_tokens,
        "ranks": ranks,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": args.commit,
        "ways": {},
    }
    for way in args.ways:
        dtype, cache = WAYS[way]
        alone = run(folder, args, device, dtype, cache, distributed=False) if first else None
        dist.barrier()
        together = run(folder, args, device, dtype, cache, distributed=True)
        dist.barrier()
        if not first:
            continue
        found = {"alone": alone, "together": together}
        record["ways"][way] = {
            "dtype": str(dtype).removeprefix("torch."),
            "cache": cache,
            "tokens_equal": bool((alone["tokens"] == together["tokens"]).all()),
            "near_ties": near_ties(alone, together),
            "ms_per_token": {name: one["ms_per_token"] for name, one in found.items()},
            "weight_bytes_per_rank": {name: one["weight_bytes"] for name, one in found.items()},
        }
        print(json.dumps({way: record["ways"][way]}), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    if first:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
