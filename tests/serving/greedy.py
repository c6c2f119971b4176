"""Comparisons of what an engine answers with the references."""

from pathlib import Path

import torch


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


def assert_greedy(tokens: list[list[int]], references: list[dict]):
    """Equal tokens; in bf16 up to the first token at which the reference was near a tie.

    The reference has also computed this token's logits in float32 ("exact"). Near a tie, the exact logits of the two
    tokens differ by at most twice the largest error of the logits in bf16: once for the reference, once for vLLM.
    """
    assert len(tokens) == len(references)
    for got, reference in zip(tokens, references, strict=True):
        want, where = reference["tokens"], f"prompt of {len(reference['prompt'])} tokens"
        first = next((i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), None)
        if first is None:
            continue
        told = f"{where}: token {first} is {got[first]}, expected {want[first]}"
        assert "exact" in reference, told
        exact = reference["exact"][first]
        gap, error = exact[want[first]] - exact[got[first]], (reference["logits"][first] - exact).abs().max()
        assert gap <= 2 * error, f"{told}; the exact logits differ by {gap:.4f}, those in bf16 err by {error:.4f}"
