"""What a model says when it generates: how long it agrees with its teacher, and whether it gives the right answers.

Scores of given tokens (`report`, `probes`) hide mistakes that follow from a model's own tokens, so a student can be
near its teacher there and far from it here.
"""

import copy
from collections import defaultdict

import torch
from torch import Tensor, nn

from hf_memmix._transformers import execution_device
from hf_memmix.training.evaluation.probes.material import Sample


@torch.no_grad()
def greedy_tokens(model: nn.Module, prompts: Tensor, new_tokens: int, batch_size: int = 32) -> Tensor:
    """The `new_tokens` likeliest next tokens [N, new_tokens] after prompts [N, P], one after the other.

    Nothing ends a text before that, so that all rows have equal lengths.
    """
    config = copy.deepcopy(model.generation_config)
    config.update(
        max_new_tokens=new_tokens, do_sample=False, num_beams=1, temperature=1.0, top_p=1.0, top_k=50,
        repetition_penalty=1.0, pad_token_id=0,
        eos_token_id=model.config.vocab_size,  # no token: for None, the library takes the model's own end
    )  # fmt: skip
    device, training, found = execution_device(model.get_input_embeddings()), model.training, []
    model.eval()
    try:
        for batch in prompts.split(batch_size):
            batch = batch.to(device)
            said = model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=config)
            found.append(said[:, batch.shape[1] :].cpu())
    finally:
        model.train(training)
    return torch.cat(found)


def divergence_of(ours: Tensor, theirs: Tensor) -> dict:
    """How long greedy texts [N, T] agree.

    Returns `{"prompts", "new_tokens", "same", "first_divergence", "median"}`: the share of texts that are the same,
    and the mean and median number of tokens before the first different one, T for texts that are the same.
    """
    differ = ours != theirs
    length = ours.shape[1]
    first = torch.where(differ.any(1), differ.int().argmax(1), length)
    return {
        "prompts": len(ours),
        "new_tokens": length,
        "same": (first == length).float().mean().item(),
        "first_divergence": first.float().mean().item(),
        "median": first.float().quantile(0.5).item(),
    }


def generated_answers(model: nn.Module, samples: list[Sample], batch_size: int = 32) -> float:
    """The share of samples whose only answer, at their end, is what the model generates there."""
    groups = defaultdict(list)  # of equally long prompts and answers, so that nothing is padded
    for sample in samples:
        (answer,) = sample.answers
        groups[answer.start, len(sample.ids) - answer.start].append(sample.ids)
    right = 0
    for (start, size), rows in groups.items():
        ids = torch.tensor(rows)
        right += (greedy_tokens(model, ids[:, :start], size, batch_size) == ids[:, start:]).all(1).sum().item()
    return right / len(samples)
