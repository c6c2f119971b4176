"""Comparisons of what an engine answers with the references."""

from pathlib import Path

import torch

# bf16 has 8 bits: two sums of the same numbers in another order may differ by some units in the last place
TIE = {"float32": 0.0, "bfloat16": 2.0**-5}


def references_of(folder: Path, case: str, which: str, dtype: str = "float32") -> list[dict]:
    """See `references.answers`."""
    return torch.load(folder / case / "references.pt", weights_only=True)[dtype][which]


def tokens_of(outputs) -> list[list[int]]:
    """The tokens of the first answer to each prompt."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def ask(engine, references, **options):
    """The outputs for the prompts of references, all submitted at once; greedy unless `options` say otherwise."""
    from vllm import SamplingParams

    fixed = {"temperature": 0, "max_tokens": len(references[0]["tokens"]), "ignore_eos": True, "detokenize": False}
    prompts = [{"prompt_token_ids": reference["prompt"]} for reference in references]
    return engine.generate(prompts, SamplingParams(**(fixed | options)), use_tqdm=False)


def assert_greedy(tokens: list[list[int]], references: list[dict], dtype: str = "float32"):
    """Equal tokens; in bf16 up to the first token at which the reference was near a tie.

    A tie: the reference's own logits of the two tokens differ by less than `TIE` of the largest logit.
    """
    assert len(tokens) == len(references)
    for got, reference in zip(tokens, references, strict=True):
        want, where = reference["tokens"], f"prompt of {len(reference['prompt'])} tokens"
        first = next((i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), None)
        if first is None:
            continue
        logits = reference["logits"][first]
        gap = float(logits[want[first]] - logits[got[first]]) / float(logits.abs().max())
        assert gap < TIE[dtype], f"{where}: token {first} is {got[first]}, expected {want[first]}; gap {gap:.4f}"
