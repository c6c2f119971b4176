"""What a model says when it generates: how long it agrees with its teacher, and whether it gives the right answers.

Scores of given tokens (`report`, `probes`) hide mistakes that follow from a model's own tokens, so a student can be
near its teacher there and far from it here.
"""

import random
import re
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from hf_memmix._transformers import execution_device
from hf_memmix.conversion.limits import limit_of
from hf_memmix.conversion.text_rows import end_tokens
from hf_memmix.errors import UserError
from hf_memmix.training.evaluation.probes.counted import Z, wilson
from hf_memmix.training.evaluation.probes.material import Material, Sample

MEASURED = 8  # tokens whose time the estimate is made of
SPARE = 16  # tokens of a generated answer beside the expected ones, because a model may word it in another way


@torch.no_grad()
def greedy_tokens(model: nn.Module, prompts: Tensor, new_tokens: int, batch_size: int = 32) -> Tensor:
    """The `new_tokens` likeliest next tokens [N, new_tokens] after prompts [N, P], one after the other.

    No setting of the model's own generation config counts: nothing ends a text before that, so that all rows have
    equal lengths, and no token is forced, suppressed or penalised.
    """
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False)
    device, training, found = execution_device(model.get_input_embeddings()), model.training, []
    # where `config` has None, generate() takes what stands in the model, which a wrapper such as PEFT's may hold
    own = {module: module.generation_config for module in model.modules() if "generation_config" in vars(module)}
    for module in own:
        module.generation_config = GenerationConfig()
    model.eval()
    try:
        for batch in prompts.split(batch_size):
            batch = batch.to(device)
            said = model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=config)
            found.append(said[:, batch.shape[1] :].cpu())
    finally:
        for module, settings in own.items():
            module.generation_config = settings
        model.train(training)
    return torch.cat(found)


def divergence_of(ours: Tensor, theirs: Tensor, ends: set[int] = frozenset()) -> dict:
    """How long greedy texts [N, T] agree. What follows one of the tokens `ends` in `theirs` does not count.

    Returns `{"prompts", "new_tokens", "same", "same_interval", "first_divergence", "error", "median"}`: the share of
    texts that are the same, with its interval of 95 %; the mean number of tokens before the first different one, T for
    texts that are the same, with its standard error (None for one text); and the median.
    """
    ended = torch.isin(theirs, torch.tensor(sorted(ends), dtype=theirs.dtype))
    differ = (ours != theirs) & (ended.cumsum(1) - ended.int() == 0)
    length = ours.shape[1]
    first = torch.where(differ.any(1), differ.int().argmax(1), length).float()
    same = (first == length).float().mean().item()
    return {
        "prompts": len(ours),
        "new_tokens": length,
        "same": same,
        "same_interval": list(wilson(same, len(ours))),
        "first_divergence": first.mean().item(),
        "error": first.std().item() / len(ours) ** 0.5 if len(ours) > 1 else None,
        "median": first.quantile(0.5).item(),
    }


def tokens_of_text(material: Material, prompt_tokens: int) -> int:
    """How many tokens of a prompt of `compare_texts` are text. Raises ValueError if none is."""
    around = len(material.start) + len(material.turn)
    if prompt_tokens <= around:
        raise UserError(
            f"prompt_tokens is {prompt_tokens}, and {around} of a prompt are no text; give a longer prompt"
        )
    return prompt_tokens - around


def compare_texts(
    models: dict[str, nn.Module | Callable[[], nn.Module]],
    material: Material,
    *,
    prompts: int = 200,
    prompt_tokens: int = 256,
    new_tokens: int = 256,
    seed: int = 0,
    batch_size: int = 8,
    estimate: Callable[[float], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Texts that every model generates after pieces of the material's text, beside those of the model "teacher".

    In a chat, a piece is the message of the user. The end of a text, as the teacher's generation config and tokenizer
    name it, ends the comparison.

    Args:
        models: as those of `run_probes`.
        prompt_tokens: tokens of a prompt, with those of the chat template.
        estimate: called once with the seconds that all texts take, by some measured tokens of the first model.

    Returns:
        `divergence_of` by the name of each other model, and `settings`.

    Raises:
        ValueError: `prompt_tokens` leaves no room for text.
    """
    draw, size = random.Random(f"{seed} texts"), tokens_of_text(material, prompt_tokens)
    pieces = [[*material.start, *material.window(size, draw), *material.turn] for _ in range(prompts)]
    asked, said, ends = torch.tensor(pieces), {}, set()
    for done, (name, model) in enumerate(models.items()):
        model = model if isinstance(model, nn.Module) else model()
        if estimate is not None and not done:
            estimate(len(models) * -(-prompts // batch_size) * _seconds_of(model, asked[:batch_size], new_tokens))
        texts = []
        for number, batch in enumerate(asked.split(batch_size), 1):
            texts.append(greedy_tokens(model, batch, new_tokens, batch_size))
            if progress is not None:
                progress(done * prompts + min(number * batch_size, prompts), len(models) * prompts)
        said[name] = torch.cat(texts)
        if name == "teacher":
            ends = end_tokens(model.generation_config, material.tokenizer)
        del model
    settings = {"prompts": prompts, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "seed": seed}
    others = {name: divergence_of(texts, said["teacher"], ends) for name, texts in said.items() if name != "teacher"}
    return others | {"settings": settings}


def _seconds_of(model: nn.Module, prompts: Tensor, new_tokens: int) -> float:
    """The time of `greedy_tokens` for one batch, from that of its prompts and that of a few tokens."""

    def measured(count: int) -> float:
        began = time.perf_counter()
        greedy_tokens(model, prompts, count, len(prompts))
        return time.perf_counter() - began

    measured(1)  # kernels are compiled
    few = min(MEASURED, new_tokens)
    first, more = measured(1), measured(few)
    return first + max(more - first, 0.0) / max(few - 1, 1) * (new_tokens - 1)


def text_of(found: dict) -> str:
    """A `divergence_of` in words."""
    low, high = (100 * bound for bound in found["same_interval"])
    error = "" if found["error"] is None else f" ± {Z * found['error']:.0f}"
    return (
        f"the first token that is not the teacher's comes after {found['first_divergence']:.0f}{error} of"
        f" {found['new_tokens']} (median {found['median']:.0f}), and {100 * found['same']:.0f}% ({low:.0f}-{high:.0f})"
        f" of {found['prompts']} texts are the same"
    )


def generated_answers(
    model: nn.Module, samples: list[Sample], tokenizer=None, batch_size: int = 32
) -> list[bool | None]:
    """Whether a model that generates gives the answer of each sample; None for a sample without `Answer.asked`.

    If the answer is asked for where it stands, the generated tokens must be those of the answer. After a question, the
    generated text must have it as a word; this needs the tokenizer.
    """
    found: list[bool | None] = [None] * len(samples)
    groups = defaultdict(list)  # of equally long prompts and answers, so that nothing is padded
    for number, sample in enumerate(samples):
        if (answer := sample.answers[-1]).asked is not None:
            groups[answer.asked, answer.start, answer.stop].append(number)
    for (asked, start, stop), numbers in groups.items():
        ids = torch.tensor([samples[number].ids for number in numbers])
        spare = min(SPARE, limit_of(model) - stop) if asked < start else 0
        new_tokens = stop - asked + spare
        said = greedy_tokens(model, ids[:, :asked], new_tokens, batch_size)
        for number, ours, expected in zip(numbers, said, ids[:, start:stop], strict=True):
            found[number] = torch.equal(ours, expected) if asked == start else _names(model, tokenizer, ours, expected)
    return found


def _names(model: nn.Module, tokenizer, said: Tensor, expected: Tensor) -> bool:
    """Whether a generated text has the expected word before its end."""
    ends = end_tokens(model.generation_config, tokenizer)
    said = said[: next((at for at, token in enumerate(said.tolist()) if token in ends), len(said))]
    text, word = (tokenizer.decode(tokens, skip_special_tokens=True).lower() for tokens in (said, expected))
    return re.search(rf"\b{re.escape(word.strip())}\b", text) is not None
