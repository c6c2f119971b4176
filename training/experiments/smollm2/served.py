"""A student of SmolLM2 on vLLM: are its tokens those of generate(), and is its recall that of `memmix eval`?

    python training/experiments/smollm2/served.py --student runs/real/student --text .scratch/smollm2/heldout.txt \
        --out training/experiments/smollm2/results/served.json

It runs in an environment with vLLM. Transformers comes first, because vLLM changes its classes of decoders.
"""

import importlib.metadata
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


def main(
    student: Annotated[Path, typer.Option(help="folder of the student")],
    text: Annotated[Path, typer.Option(help="held-out text of prompts and probes")],
    out: Annotated[Path, typer.Option(help="JSON file of the results")],
    length: Annotated[int, typer.Option(help="tokens of a prompt and of a probe")] = 1024,
    samples: Annotated[int, typer.Option(help="answers per probe and depth")] = 8,
    prompts: Annotated[int, typer.Option(help="texts that are continued at the same time")] = 16,
    new_tokens: Annotated[int, typer.Option(help="tokens of each")] = 64,
) -> None:
    """Compare greedy tokens and exact answers on vLLM with those of Transformers, in fp32."""
    material = Material(AutoTokenizer.from_pretrained(student), text.read_text(encoding="utf-8"))
    asked = {task: [one for d in DEPTHS for one in draw(task, material, length, d, SEED, samples)] for task in TASKS}
    begins = [material.filler[length * i : length * (i + 1)] for i in range(prompts)]
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32).to(device()).eval()
    own = greedy_tokens(model, torch.tensor(begins), new_tokens, batch_size=4)
    exact = {task: [found.exact for found in score(model, of, 4, control=False)] for task, of in asked.items()}
    del model
    llm = _engine(student, length + new_tokens, prompts)
    texts = _greedy(llm, begins, [new_tokens] * prompts)
    right = {task: _right(llm, of) for task, of in asked.items()}
    write_json(
        out,
        {
            "experiment": "served",
            "environment": environment() | {"vllm": importlib.metadata.version("vllm")},
            "settings": {"length": length, "seed": SEED, "dtype": "float32"},
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
        },
    )


def table(results: dict) -> str:
    """Right answers by probe, and how many texts are the same."""
    names = ("answers", "exact_in_eval", "exact_on_vllm", "differ")
    rows = [[f"`{task}`", *(cell[name] for name in names)] for task, cell in results["recall"].items()]
    head = ["probe", "answers", "right in `eval`", "right on vLLM", "different"]
    texts, length = results["texts"], results["settings"]["length"]
    same = f"{round(texts['same'] * texts['prompts'])} of {texts['prompts']}"
    return (
        f"{markdown_table(head, rows, figures=True)}\n\n{same} texts of {length:,} tokens are continued by the same"
        f" {texts['new_tokens']} tokens as by `generate()`. fp32, vLLM {results['environment']['vllm']},"
        f" {measured_at(results | {'rows': [{}]})}."
    )


def _engine(folder: Path, longest: int, sequences: int):
    from vllm import LLM

    options = {"max_model_len": longest, "max_num_seqs": sequences, "enable_prefix_caching": False}
    return LLM(str(folder), dtype="float32", **options)


def _greedy(llm, prompts: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in new_tokens]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(one.outputs[0].token_ids) for one in llm.generate(given, params, use_tqdm=False)]


def _right(llm, samples: list) -> list[bool]:
    """Whether the model says exactly the answers of the samples."""
    pairs = [(sample.ids, answer) for sample in samples for answer in sample.answers]
    said = _greedy(llm, [ids[: a.start] for ids, a in pairs], [a.stop - a.start for _, a in pairs])
    return [tokens == ids[a.start : a.stop] for tokens, (ids, a) in zip(said, pairs, strict=True)]


if __name__ == "__main__":
    typer.run(main)
