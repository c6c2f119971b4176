"""Comparisons of what an engine answers with the references."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import references as reference_program
import torch
from references import FILE, ready

import child

# two tokens whose fp32 logits differ by less are a near tie. The logits of our models reach from -4 to 4; those of
# vLLM in fp32 on a GPU have errors of up to 1e-4, by another order of the sums
NEAR_TIE = 2e-4
# answers of a model, in a process without vLLM
ANSWER = """
import json, sys, torch
from transformers import AutoModelForCausalLM
import hf_memmix
model, found = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32), []
for prompt, count in json.load(sys.stdin):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=ids * 0 + 1, max_new_tokens=count, do_sample=False, eos_token_id=None)
    found.append(out[0, len(prompt) :].tolist())
print(json.dumps(found))
"""


def references_of(folder: Path, case: str, which: str, dtype: str = "float32") -> list[dict]:
    """See `references.answers`; "folder" is that of the model."""
    found = torch.load(ready(folder / case) / FILE, weights_only=True)[dtype][which]
    return [answer | {"folder": folder / case} for answer in found]


def pooled(engines, case, **options):
    """An engine of a pooling model, and the references."""
    references = torch.load(ready(engines.folders / case) / FILE, weights_only=True)["pooled"]
    engine = engines.get(case, runner="pooling", **options)
    return engine, [{"prompt_token_ids": r["prompt"]} for r in references], [r["vector"] for r in references]


def tokens_of(outputs) -> list[list[int]]:
    """The tokens of the first answer to each prompt."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def ask(engine, references, adapters=None, **options):
    """The outputs for the prompts of references, all submitted at once; greedy unless `options` say otherwise.

    adapters: vLLM's LoRARequest of each, or None.
    """
    from vllm import SamplingParams

    fixed = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    if "max_tokens" not in options:
        fixed["max_tokens"] = len(references[0]["tokens"])
    prompts = [{"prompt_token_ids": reference["prompt"]} for reference in references]
    return engine.generate(prompts, SamplingParams(**(fixed | options)), lora_request=adapters, use_tqdm=False)


def assert_greedy(tokens: list[list[int]], references: list[dict]):
    """Equal tokens. On a GPU an answer may leave the reference at a near tie: then the reference model must find at
    each of its tokens, after the same tokens, that no other token is better by more than `NEAR_TIE`.
    """
    assert len(tokens) == len(references)
    for got, reference in zip(tokens, references, strict=True):
        if got != reference["tokens"]:
            where = f"prompt of {len(reference['prompt'])} tokens: {got}, generate(): {reference['tokens']}"
            assert torch.cuda.is_available() and len(got) == len(reference["tokens"]), where
            gaps = gaps_below_the_best(reference, got)
            assert max(gaps) <= NEAR_TIE, f"{where}; below the best logit by {[f'{gap:.1e}' for gap in gaps]}"


def assert_log_probabilities(outputs, references: list[dict]):
    """Those that the outputs have are those of the reference; vLLM must also know what the family does to logits."""
    for output, reference in zip(outputs, references, strict=True):
        expected = reference["logits"].log_softmax(-1)
        for step, found in enumerate(output.outputs[0].logprobs):
            assert len(found) >= 5
            for token, entry in found.items():
                assert entry.logprob == pytest.approx(expected[step, token].item(), abs=2e-3)


def gaps_below_the_best(reference: dict, tokens: list[int]) -> list[float]:
    """`references.follow` for other tokens after the prompt of a reference, in a process without vLLM."""
    file = reference["folder"] / "follow.json"
    file.write_text(json.dumps({"prompt": reference["prompt"], "tokens": tokens}))
    script = [sys.executable, reference_program.__file__, str(reference["folder"]), "--follow", str(file)]
    result = subprocess.run(script, env=child.child_env(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def refused(engines, folder, **options) -> str:
    """The messages of the error and of what has caused it: vLLM puts some errors of a configuration into its own."""
    engines.close()
    with pytest.raises(Exception) as raised:
        engines.get(str(folder), **options)
    error, found = raised.value, []
    while error is not None:
        found.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(found)


def logits_at(engine, references) -> list[torch.Tensor]:
    """For each prompt, the logits [tokens, vocabulary] by which the engine chooses after the tokens of the reference.

    All prompts are submitted at once. Where the engine chooses another token than the reference, it is asked again,
    with a prompt that goes on to the reference's token.
    """
    from vllm import SamplingParams

    fixed = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": -1}
    found = [[] for _ in references]
    while missing := [i for i, rows in enumerate(found) if len(rows) < len(references[i]["tokens"])]:
        done = [references[i]["tokens"][: len(found[i])] for i in missing]
        prompts = [
            {"prompt_token_ids": references[i]["prompt"] + tokens} for i, tokens in zip(missing, done, strict=True)
        ]
        params = [
            SamplingParams(max_tokens=len(references[i]["tokens"]) - len(tokens), **fixed)
            for i, tokens in zip(missing, done, strict=True)
        ]
        for i, output in zip(missing, engine.generate(prompts, params, use_tqdm=False), strict=True):
            for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
                want = references[i]["tokens"][len(found[i])]
                found[i].append(torch.tensor([step[t].logprob for t in range(len(step))]))
                if token != want:
                    break
    return [torch.stack(rows) for rows in found]


def error_ratio(logits: list[torch.Tensor], references: list[dict]) -> float:
    """The root mean square error of an engine's logits over that of the references, both against the exact logits."""
    served = torch.cat([found - r["exact"] for found, r in zip(logits, references, strict=True)])
    return (served.square().mean() / torch.cat([r["logits"] - r["exact"] for r in references]).square().mean()).sqrt()


def assert_near_ties(logits: list[torch.Tensor], references: list[dict]):
    """Where the engine would choose another token than the reference, the exact logits of the two tokens are closer
    than the largest errors of the engine and of the reference at this position together.
    """
    for found, reference in zip(logits, references, strict=True):
        exact, want, got = reference["exact"], torch.tensor(reference["tokens"]), found.argmax(-1)
        gap = exact.gather(1, want[:, None]) - exact.gather(1, got[:, None])
        errors = [(x - exact).abs().amax(-1, keepdim=True) for x in (found, reference["logits"])]
        where = f"prompt of {len(reference['prompt'])} tokens"
        assert (gap <= sum(errors)).all(), f"{where}: tokens {(gap > sum(errors))[:, 0].nonzero().flatten().tolist()}"
