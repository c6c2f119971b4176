"""A student of SmolLM2 on vLLM: are its tokens those of generate(), is its recall that of `memmix eval`, and how fast
are it and its teacher?

    python training/experiments/smollm2/served.py --student runs/real/student --teacher .scratch/smollm2_teacher \
        --text .scratch/smollm2/heldout.txt --out training/experiments/smollm2/results/served.json

It runs in an environment with vLLM. Transformers comes first, because vLLM changes its classes of decoders.
"""

import importlib.metadata
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_memmix  # noqa: F401  registers the converted models
from hf_memmix.conversion.records import environment, markdown_table, write_json
from hf_memmix.training.evaluation.free_generation import divergence_of, greedy_tokens
from hf_memmix.training.evaluation.probes.material import Material
from hf_memmix.training.evaluation.probes.score import score
from hf_memmix.training.evaluation.probes.tasks import DEPTHS, draw
from hf_memmix.training.experiments.common.harness import device, measured_at

SEED, TASKS = 0, ("fact", "pairs")
ROUNDS = 3  # of a speed, in turns


def main(
    student: Annotated[Path, typer.Option(help="folder of the student")],
    teacher: Annotated[Path, typer.Option(help="folder of the teacher")],
    text: Annotated[Path, typer.Option(help="held-out text of prompts and probes")],
    out: Annotated[Path, typer.Option(help="JSON file of the results")],
    length: Annotated[int, typer.Option(help="tokens of a prompt and of a probe")] = 1024,
    samples: Annotated[int, typer.Option(help="answers per probe and depth")] = 8,
    prompts: Annotated[int, typer.Option(help="texts that are continued at the same time")] = 16,
    new_tokens: Annotated[int, typer.Option(help="tokens of each")] = 64,
    speed_length: Annotated[int, typer.Option(help="tokens of a prompt where the speed is measured")] = 2048,
    speed_prompts: Annotated[int, typer.Option(help="such texts at the same time")] = 4,
) -> None:
    """Compare greedy tokens and exact answers on vLLM with those of Transformers, in fp32, and the speed with that of
    the teacher.
    """
    material = Material(AutoTokenizer.from_pretrained(student), text.read_text(encoding="utf-8"))
    asked = {task: [one for d in DEPTHS for one in draw(task, material, length, d, SEED, samples)] for task in TASKS}
    begins = [material.filler[length * i : length * (i + 1)] for i in range(prompts)]
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32).to(device()).eval()
    own = greedy_tokens(model, torch.tensor(begins), new_tokens, batch_size=4)
    exact = {task: [found.exact for found in score(model, of, 4, control=False)] for task, of in asked.items()}
    del model
    longest = max(length, speed_length) + new_tokens
    llms = {role: _engine(folder, longest, prompts) for role, folder in (("student", student), ("teacher", teacher))}
    texts = _greedy(llms["student"], begins, [new_tokens] * prompts)
    right = {task: _right(llms["student"], of) for task, of in asked.items()}
    long = [material.filler[speed_length * i : speed_length * (i + 1)] for i in range(speed_prompts)]
    speed = _speeds(llms, long, new_tokens)
    write_json(
        out,
        {
            "experiment": "served",
            "environment": environment() | {"vllm": importlib.metadata.version("vllm")},
            "settings": {"length": length, "speed_length": speed_length, "seed": SEED, "dtype": "float32"},
            "texts": divergence_of(torch.tensor(texts), own),
            "recall": {
                task: {
                    "answers": len(exact[task]),
                    "exact_in_eval": sum(exact[task]),
                    "exact_on_vllm": sum(right[task]),
                    "differ": sum(a != b for a, b in zip(exact[task], right[task], strict=True)),
                }
                for task in TASKS
            },
            "speed": speed,
        },
    )


def table(results: dict) -> str:
    """Right answers by probe, and how many texts are the same."""
    names = ("answers", "exact_in_eval", "exact_on_vllm", "differ")
    rows = [[f"`{task}`", *(cell[name] for name in names)] for task, cell in results["recall"].items()]
    head = ["probe", "answers", "right in `eval`", "right on vLLM", "different"]
    texts, length = results["texts"], results["settings"]["length"]
    same = f"{round(texts['same'] * texts['prompts'])} of {texts['prompts']}"
    speed = results["speed"]["student"]
    counts = f"{speed['prompts']} texts of {results['settings']['speed_length']:,} tokens"
    fast = [[role, *(f"{value:.1f}" for value in _speeds_of(found))] for role, found in results["speed"].items()]
    fast = markdown_table(
        ["model", "tokens/s", "tokens/s after the prompts", "seconds for the prompts"], fast, figures=True
    )
    return (
        f"{markdown_table(head, rows, figures=True)}\n\n{same} texts of {length:,} tokens are continued by the same"
        f" {texts['new_tokens']} tokens as by `generate()`.\n\n{fast}\n\n{counts} at the same time,"
        f" {speed['new_tokens']} tokens each, median of {speed['rounds']} rounds. fp32, vLLM"
        f" {results['environment']['vllm']}, {measured_at(results | {'rows': [{}]})}."
    )


def _engine(folder: Path, longest: int, sequences: int):
    from vllm import LLM

    # other programs may use the memory of a CPU too
    options = {"max_model_len": longest, "max_num_seqs": sequences, "gpu_memory_utilization": 0.3}
    return LLM(str(folder), dtype="float32", enable_prefix_caching=False, **options)


def _greedy(llm, prompts: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in new_tokens]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(one.outputs[0].token_ids) for one in llm.generate(given, params, use_tqdm=False)]


def _speeds(llms: dict, prompts: list[list[int]], new_tokens: int) -> dict[str, dict]:
    """Of each engine, the median seconds of the prompts with one token each, and of the whole run."""
    seconds = {(role, count): [] for role in llms for count in (1, new_tokens)}
    for llm in llms.values():
        _greedy(llm, prompts[:1], [2])  # what is compiled late
    for _ in range(ROUNDS):
        for (role, count), taken in seconds.items():
            began = time.perf_counter()
            _greedy(llms[role], prompts, [count] * len(prompts))
            taken.append(time.perf_counter() - began)
    medians = {key: round(statistics.median(taken), 3) for key, taken in seconds.items()}
    counts = {"prompts": len(prompts), "new_tokens": new_tokens, "rounds": ROUNDS}
    return {role: counts | {"prompt_seconds": medians[role, 1], "seconds": medians[role, new_tokens]} for role in llms}


def _speeds_of(found: dict) -> tuple[float, float, float]:
    """Tokens per second of the whole run and after the prompts; seconds of the prompts."""
    first, whole, count = found["prompt_seconds"], found["seconds"], found["prompts"]
    return count * found["new_tokens"] / whole, count * (found["new_tokens"] - 1) / (whole - first), first


def _right(llm, samples: list) -> list[bool]:
    """Whether the model says exactly the answers of the samples."""
    pairs = [(sample.ids, answer) for sample in samples for answer in sample.answers]
    said = _greedy(llm, [ids[: a.start] for ids, a in pairs], [a.stop - a.start for _, a in pairs])
    return [tokens == ids[a.start : a.stop] for tokens, (ids, a) in zip(said, pairs, strict=True)]


if __name__ == "__main__":
    typer.run(main)
