"""What a request or the engine may be asked for beyond greedy tokens."""

import json
import math
import re

import pytest
import torch
from greedy import ask, assert_greedy, logits_at, references_of, refused, tokens_of
from references import FILE, ready
from serving_cases import ASSET

TEXT = "When he came to the city, he"
# an engine with a tokenizer
WITH_TEXT = {"skip_tokenizer_init": False, "max_logprobs": 8}
WITH_TEXT |= {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}


@pytest.fixture
def engine(engines):
    return engines.get(ASSET, **WITH_TEXT)


def complete(engine, **options):
    """The answer to `TEXT`."""
    from vllm import SamplingParams

    params = SamplingParams(**({"temperature": 0, "max_tokens": 16} | options))
    (output,) = engine.generate([TEXT], params, use_tqdm=False)
    return output.outputs[0]


@pytest.mark.cases(ASSET)
def test_stops(engine):
    """A string, a token, and a least number of tokens before them."""
    free = complete(engine)
    tokens, (first, second) = list(free.token_ids), re.findall(r"\w+", free.text)[:2]
    stopped = complete(engine, stop=[second])
    assert stopped.text == free.text[: free.text.index(second)] and first in stopped.text
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", second)
    place = next(i for i, token in enumerate(tokens) if i > 2 and token not in tokens[:i])
    stopped = complete(engine, stop_token_ids=[tokens[place]])
    assert list(stopped.token_ids) == tokens[: place + 1] and stopped.stop_reason == tokens[place]
    later = list(complete(engine, stop_token_ids=[tokens[place]], min_tokens=place + 3).token_ids)
    assert later[:place] == tokens[:place] and len(later) >= place + 3
    assert tokens[place] not in later[: place + 3]


@pytest.mark.cases(ASSET)
def test_biased_and_allowed_tokens(engine, engines):
    """The first token is the best one of those that are left, by the logits of transformers."""
    references = references_of(engines.folders, ASSET, "plain")
    for reference in references[-2:]:
        logits = reference["logits"][0].clone()
        best = reference["tokens"][0]
        (forbidden,) = tokens_of(ask(engine, [reference], logit_bias={best: -100.0}, max_tokens=1))
        allowed = [7, 12, 300, best + 1]
        (chosen,) = tokens_of(ask(engine, [reference], allowed_token_ids=allowed, max_tokens=3))
        assert chosen[0] == max(allowed, key=lambda token: logits[token].item()) and set(chosen) <= set(allowed)
        logits[best] = -math.inf
        assert forbidden == [logits.argmax().item()]


@pytest.mark.cases(ASSET)
def test_structured_outputs(engine):
    from vllm.sampling_params import StructuredOutputsParams as Structure

    pattern = "[0-9]{3}-[a-z]{2}"
    assert re.fullmatch(pattern, complete(engine, structured_outputs=Structure(regex=pattern)).text)
    assert complete(engine, structured_outputs=Structure(choice=["yes", "no"])).text in ("yes", "no")
    schema = {"type": "object", "properties": {"kind": {"enum": ["man", "city"]}}, "required": ["kind"]}
    schema["additionalProperties"] = False
    form = Structure(json=schema)
    assert json.loads(complete(engine, structured_outputs=form, max_tokens=60).text)["kind"] in ("man", "city")


@pytest.mark.cases(ASSET)
def test_beam_search(engine, engines):
    """The sequences of transformers' beam search. vLLM asks the model anew for each token of each beam."""
    from vllm.sampling_params import BeamSearchParams

    (reference,) = torch.load(ready(engines.folders / ASSET) / FILE, weights_only=True)["beams"]
    prompt, expected = reference["prompt"], reference["beams"]
    params = BeamSearchParams(beam_width=len(expected), max_tokens=len(expected[0]), ignore_eos=True)
    (output,) = engine.beam_search([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert [sequence.tokens[len(prompt) :] for sequence in output.sequences] == expected
    assert [sequence.cum_logprob for sequence in output.sequences] == pytest.approx(reference["scores"], abs=2e-3)


@pytest.mark.parametrize("case", ["several", ASSET], scope="module")
def test_log_probabilities_of_prompts(case, engines):
    """Also if a prompt is read in pieces of 48 tokens."""
    engine = engines.get(case, max_num_batched_tokens=48, max_num_seqs=8, max_logprobs=5)
    references = torch.load(ready(engines.folders / case) / FILE, weights_only=True)["prompts"]
    for output, reference in zip(ask(engine, references, prompt_logprobs=1, max_tokens=1), references, strict=True):
        first, *found = output.prompt_logprobs
        assert first is None and len(found) == len(reference["prompt"]) - 1
        pairs = zip(found, reference["prompt"][1:], strict=True)
        assert [step[token].logprob for step, token in pairs] == pytest.approx(
            reference["logprobs"].tolist(), abs=2e-3
        )


@pytest.mark.cases("gka")
def test_keys_in_fp8(engines):
    """As transformers with keys and values that are rounded to fp8, with an unknown and with a known prefix."""
    options = {"kv_cache_dtype": "fp8", "max_logprobs": -1, "logprobs_mode": "raw_logits"}
    options |= {"enable_prefix_caching": True, "max_num_batched_tokens": 512}
    if not (torch.cuda.is_available() or torch.cpu._is_avx512_supported()):
        assert "FP8 KV cache on CPU requires x86 with AVX-512 or AMX" in refused(engines, "gka", **options)
        return
    engine = engines.get("gka", **options)
    references = torch.load(ready(engines.folders / "gka") / FILE, weights_only=True)["fp8"]
    expected = torch.cat([reference["logits"] for reference in references])
    unrounded = torch.cat([reference["logits"] for reference in references_of(engines.folders, "gka", "plain")])
    assert (unrounded - expected).square().mean().sqrt() > 0.2
    for _ in range(2):
        error = torch.cat(logits_at(engine, references)) - expected
        assert error.square().mean().sqrt() < 0.01
    block = engine.llm_engine.vllm_config.cache_config.block_size
    hits = [output.num_cached_tokens for output in ask(engine, references)]
    assert max(hits) >= block and max(len(reference["prompt"]) for reference in references) > block


@pytest.mark.gpu
@pytest.mark.cases("gka")
def test_sleep(engines):
    """A GPU's memory is given back and taken again."""
    engine, references = engines.get("gka", enable_sleep_mode=True), references_of(engines.folders, "gka", "plain")
    for _ in range(2):
        assert_greedy(tokens_of(ask(engine, references)), references)
        engine.sleep(level=1)
        engine.wake_up()
    assert_greedy(tokens_of(ask(engine, references)), references)


@pytest.mark.cases("gka_pure")
def test_states_are_not_stored_in_fp8(engines):
    references = references_of(engines.folders, "gka_pure", "plain")
    engine = engines.get("gka_pure", kv_cache_dtype="fp8")
    assert_greedy(tokens_of(ask(engine, references)), references)
