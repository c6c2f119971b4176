"""What transformers computes, in a process without vLLM: python references.py FOLDER CASE ...

vLLM changes the decoder classes of transformers when it builds a model of them. So a process of its own makes the
models, saves them, and writes what `generate()` answers.
"""

import shutil
import sys
import time
from pathlib import Path

import serving_cases
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

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
        ids = torch.tensor([prompt])
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
        found.append({"prompt": prompt, "tokens": tokens, "logits": torch.stack(out.logits)[:, 0].float()})
    return found


def add_exact_logits(model, found: list[dict]):
    """Add to each answer what the same weights, moved to float32, give for the same tokens: "exact"."""
    for answer in found:
        ids = torch.tensor([answer["prompt"] + answer["tokens"][:-1]])
        answer["exact"] = model(ids, use_cache=False).logits[0, len(answer["prompt"]) - 1 :]


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
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # the library's default, "sdpa", leaves the soft-cap out
    if name != serving_cases.ASSET:
        model.save_pretrained(folder / name)
    references = {"pooled": pooled(model, case)} if case.labels or name == serving_cases.ASSET else {}
    if not case.labels:
        for dtype in case.dtypes:
            model = model.to(getattr(torch, dtype))
            references[dtype] = {which: answers(model, which) for which in case.prompts}
            if dtype != "float32":
                model = model.float()  # with the rounded weights
                for found in references[dtype].values():
                    add_exact_logits(model, found)
    torch.save(references, folder / name / "part")
    (folder / name / "part").rename(folder / name / FILE)


if __name__ == "__main__":
    target, *names = sys.argv[1:]
    torch.set_num_threads(1)
    for each in names:
        write(Path(target), each)
