"""What transformers computes, in a process without vLLM: python references.py FOLDER CASE ...

vLLM changes the decoder classes of transformers when it builds a model of them. So a process of its own makes the
models, saves them, and writes what `generate()` answers.

All numbers in fp32 are those of a CPU and of plain PyTorch operations. Answers in bf16 are computed where vLLM
computes: in bf16, every processor has other errors.

    python references.py FOLDER/CASE --follow FILE

reads {"prompt", "tokens"} from a JSON file and prints by how much the fp32 logit of each token is below the largest.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import serving_cases
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_memmix.assets import asset_path
from testing import build, randomize

FILE, LOG = "references.pt", "references.log"


def ready(folder: Path) -> Path:
    """The folder of a case, as soon as this program has written all of it."""
    deadline = time.monotonic() + 900
    while not (folder / FILE).exists():
        log = (folder.parent / LOG).read_text()
        assert "Traceback" not in log and time.monotonic() < deadline, log[-4000:]
        time.sleep(0.2)
    return folder


def answers(model, which: str) -> list[dict]:
    """For each of these prompts the greedy tokens and the logits [tokens, vocabulary] that each was chosen by."""
    found = []
    for prompt in serving_cases.PROMPTS[which]:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=serving_cases.NEW_TOKENS[which],
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[0, len(prompt) :].tolist()
        found.append({"prompt": prompt, "tokens": tokens, "logits": torch.stack(out.logits)[:, 0].float().cpu()})
    return found


def add_exact_logits(model, found: list[dict]):
    """Add to each answer what the same weights, moved to float32, give for the same tokens: "exact"."""
    for answer in found:
        answer["exact"] = logits_after(model, answer["prompt"], answer["tokens"])


def logits_after(model, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The logits [tokens, vocabulary] that each of the tokens is chosen by, in one forward without a cache."""
    return model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]


def log_probabilities(model) -> list[dict]:
    """For each prompt the log probability of each of its tokens but the first."""
    found = []
    for prompt in serving_cases.PROMPTS["plain"]:
        logprobs = model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)[:-1]
        found.append({"prompt": prompt, "logprobs": logprobs.gather(-1, torch.tensor(prompt)[1:, None])[:, 0]})
    return found


def beams(model) -> list[dict]:
    """The sequences of a beam search, the best first, and the sums of their log probabilities."""
    prompt = serving_cases.PROMPTS["few"][1]
    out = model.generate(
        torch.tensor([prompt]),
        num_beams=3,
        num_return_sequences=3,
        do_sample=False,
        max_new_tokens=8,
        eos_token_id=None,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    found = {"beams": out.sequences[:, len(prompt) :].tolist(), "scores": out.sequences_scores.tolist()}
    return [{"prompt": prompt} | found]


def as_fp8(x: torch.Tensor) -> torch.Tensor:
    """x as vLLM stores it with `kv_cache_dtype="fp8"`: 4 significant bits, rounded on a GPU, cut off on a CPU."""
    if torch.cuda.is_available():
        return x.to(torch.float8_e4m3fn).to(x.dtype)
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 16).trunc() / 16, exponent)


def round_keys(module, query, key, value, *args, **kwargs):
    """PyTorch's attention with keys and values [B, H, T, D] as a cache in fp8 has them."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, as_fp8(key), as_fp8(value), *args, **kwargs)


def with_keys_in_fp8(model) -> list[dict]:
    """`answers` of attention layers whose keys and values are kept in fp8."""
    AttentionInterface.register("round_keys", round_keys)
    AttentionMaskInterface.register("round_keys", sdpa_mask)
    model.set_attn_implementation("round_keys")
    found = answers(model, "plain")
    model.set_attn_implementation("sdpa")
    return found


@torch.inference_mode()
def follow(folder: Path, prompt: list[int], tokens: list[int]) -> list[float]:
    """By how much the logit of each token is below the largest, given the tokens before it. 0: the model's own choice.

    Args:
        folder: of a case.
    """
    model = exact_attention(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    logits = logits_after(model, prompt, tokens)
    return (logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]).tolist()


def exact_attention(model):
    """The model with the attention that its configuration describes: the library's default, "sdpa", leaves out the
    limit of the logits that some families have.
    """
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    return model


def pooled(model, case) -> list[dict]:
    """For each prompt the logits of a classifier, or the last hidden state of a decoder, scaled to unit norm."""
    found = []
    for prompt in serving_cases.PROMPTS["few"]:
        ids = torch.tensor([prompt])
        vector = model(ids).logits[0] if case.labels else model.model(ids).last_hidden_state[0, -1]
        vector = vector.softmax(-1) if case.labels else torch.nn.functional.normalize(vector, dim=-1)
        found.append({"prompt": prompt, "vector": vector})
    return found


@torch.inference_mode()
def write(folder: Path, name: str):
    """Save the model of a case and its answers."""
    case = serving_cases.CASES[name]
    if name == serving_cases.ASSET:
        shutil.copytree(asset_path(name), folder / name)
        model = AutoModelForCausalLM.from_pretrained(asset_path(name), dtype=torch.float32)
    elif case.labels:
        torch.manual_seed(0)
        model = randomize(AutoModelForSequenceClassification.from_config(case.config())).eval()
    else:
        model = build(case.config())
    if case.seed:
        generator = torch.Generator().manual_seed(case.seed)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    exact_attention(model)
    if name != serving_cases.ASSET:
        model.save_pretrained(folder / name)
    references = {"pooled": pooled(model, case)} if case.labels or name == serving_cases.ASSET else {}
    if name in serving_cases.WITH_PROMPTS:
        references["prompts"] = log_probabilities(model)
    if name == serving_cases.ASSET:
        references["beams"] = beams(model)
    if name == serving_cases.WITH_FP8:
        references["fp8"] = with_keys_in_fp8(model)
    if not case.labels:
        for dtype in case.dtypes:
            model = model.to(getattr(torch, dtype))
            if dtype != "float32" and torch.cuda.is_available():
                model = model.cuda()
            references[dtype] = {which: answers(model, which) for which in case.prompts}
            if dtype != "float32":
                model = model.cpu().float()  # with the rounded weights
                for found in references[dtype].values():
                    add_exact_logits(model, found)
    torch.save(references, folder / name / "part")
    (folder / name / "part").rename(folder / name / FILE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--follow", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.follow:
        print(json.dumps(follow(args.folder, **json.loads(args.follow.read_text()))))
    for each in args.cases:
        write(args.folder, each)
