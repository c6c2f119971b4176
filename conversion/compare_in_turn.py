"""`compare_models` for a pair that does not fit into memory together: first the teacher, then the student.

Of the teacher's probabilities, the `top_k` largest of every token are kept. The teacher runs with the student's mixers
beside it, so that the errors of the layers are those of `compare_models`.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_memmix._transformers import execution_device
from hf_memmix.conversion.compare import LayerErrors, blocks_of, check_pair, figures_of, targets_of
from hf_memmix.conversion.families import attention_module, attention_prefix
from hf_memmix.conversion.loading import meta_teacher
from hf_memmix.conversion.logits import logits_head
from hf_memmix.conversion.streaming import TrainedMixers
from hf_memmix.conversion.teacher_forcing import run_teacher_forced
from hf_memmix.conversion.text_rows import beginning_of
from hf_memmix_kernels._common import exact

TOP_K = 64


def compare_in_turn(
    student: Path,
    teacher: Path,
    load: Callable[[Path], PreTrainedModel],
    tokens: Tensor,
    tokenizer=None,
    *,
    block_size: int = 512,
    batch_size: int = 8,
    max_tokens: int | None = None,
    top_k: int = TOP_K,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Compare the models in two folders on token ids [N]. Only one of them is in memory at a time.

    Args:
        load: loads the model of a folder, e.g. spread over several devices.
        top_k: number of the teacher's probabilities that are kept per token. The others count as one event, so `kl` is
            at most that of `compare_models`, and equal to it if this is the size of the vocabulary.
        tokenizer, block_size, batch_size, max_tokens, progress: as in `compare_models`.

    Returns:
        the result of `compare_models`, and `kl_top_k`, the number of probabilities.

    Raises:
        ValueError: as in `compare_models` and `load`.
    """
    pair = meta_teacher(student), meta_teacher(teacher)
    tokens = tokens.flatten()[:max_tokens]
    check_pair(*pair, tokens, block_size)
    beginning = beginning_of(tokenizer)
    batches = blocks_of(tokens, block_size, batch_size, beginning)
    top_k = min(top_k, pair[1].config.vocab_size)
    steps = _Steps(progress, 2 * len(batches), beginning)

    nll, layer_error, kept = _teacher_pass(load(teacher), pair[0], student, batches, top_k, steps)
    student_nll, agree, kl = _student_pass(load(student), batches, kept, steps)
    count = sum(len(ids) for _, ids in kept)
    found = figures_of(count, {"teacher": nll, "student": student_nll}, agree, kl, layer_error)
    return found | {"kl_top_k": top_k}


def _teacher_pass(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    folder: Path,
    batches: list[Tensor],
    top_k: int,
    steps: "_Steps",
) -> tuple[float, dict[int, float], list[tuple[Tensor, Tensor]]]:
    """The sum of nll, the errors of the layers, and for every row log probabilities and ids [T - 1, k].

    student: the student on "meta", whose mixers are loaded from `folder`.
    """
    mixers, errors, nll, kept = with_mixers(student, folder, teacher), LayerErrors(), 0.0, []

    def run(batch: Tensor) -> Tensor:
        return run_teacher_forced(teacher, mixers, batch, errors.add)

    for logp, targets in _rows(teacher, batches, run, steps):
        nll -= _sum_at(logp, targets)
        best = logp.topk(top_k, -1)
        kept.append((best.values.cpu(), best.indices.cpu()))
    return nll, errors.of_layers(), kept


def _student_pass(
    student: PreTrainedModel, batches: list[Tensor], kept: list[tuple[Tensor, Tensor]], steps: "_Steps"
) -> tuple[float, int, float]:
    """The sums over all tokens of nll, of equal likeliest tokens, and of the KL divergence."""
    nll, agree, kl = 0.0, 0, 0.0

    def run(batch: Tensor) -> Tensor:
        return student.base_model(input_ids=batch, use_cache=False).last_hidden_state

    for (logp, targets), (theirs, ids) in zip(_rows(student, batches, run, steps), kept, strict=True):
        theirs, ids = theirs.to(logp.device), ids.to(logp.device)
        nll -= _sum_at(logp, targets)
        agree += (logp.argmax(-1) == ids[:, 0]).sum().item()
        kl += _divergence(theirs, logp.gather(-1, ids)).sum().item()
    return nll, agree, kl


class _Steps:
    """Counts the batches of both models. `beginning`: of every row."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int, beginning: list[int]):
        self.progress, self.done, self.total, self.beginning = progress, 0, total, beginning

    def advance(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


@torch.no_grad()
def _rows(model: nn.Module, batches: list[Tensor], run: Callable[[Tensor], Tensor], steps: _Steps):
    """Log probabilities [N, V] and next tokens [N] of every row of every batch; N is at most T - 1."""
    head, device = logits_head(model), execution_device(model.get_input_embeddings())
    for batch in batches:
        hidden = run(batch.to(device))
        for row, ids in zip(hidden, batch, strict=True):  # logits of one row at a time
            places, targets = targets_of(ids, steps.beginning)
            logp = head(row[places]).float().log_softmax(-1)
            yield logp, targets.to(logp.device)
        steps.advance()


def _sum_at(logp: Tensor, targets: Tensor) -> float:
    return exact(logp.gather(-1, targets[:, None])).sum().item()


def _divergence(theirs: Tensor, ours: Tensor) -> Tensor:
    """KL divergence [T] of log probabilities [T, k], with all other tokens as one event."""
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    rest, our_rest = (1 - logp.exp().sum(-1) for logp in (theirs, ours))
    both = (rest > 1e-6) & (our_rest > 1e-6)  # below, it is the rounding of the sum
    rest, our_rest = (torch.where(both, value, torch.ones_like(value)) for value in (rest, our_rest))
    return kl + rest * (rest / our_rest).log()


def with_mixers(student: PreTrainedModel, folder: Path, teacher: PreTrainedModel) -> PreTrainedModel:
    """`read_mixers`, then `place_mixers`."""
    return place_mixers(read_mixers(student, folder, teacher.dtype), teacher)


def read_mixers(student: PreTrainedModel, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load the mixers of a student on "meta" from its folder to the CPU; the rest stays without values.

    dtype: of the teacher; fp32 makes the mixers fp32 too, as `load_model` does. Otherwise they keep the stored dtypes.
    """
    if dtype == torch.float32:
        student.float()
    trained = TrainedMixers([folder])
    for layer in student.config.memory_layers:
        mixer = attention_module(student, layer)
        mixer.to_empty(device="cpu")
        trained.load(mixer, attention_prefix(student, layer) + ".")
    return student.eval()


def place_mixers(student: PreTrainedModel, teacher: PreTrainedModel) -> PreTrainedModel:
    """Let each mixer, which is on the CPU, compute on the device on which the teacher computes its layer.

    If that is a GPU, a mixer is there only while it computes.
    """
    for layer in student.config.memory_layers:
        device = execution_device(attention_module(teacher, layer))
        if device.type != "cpu":
            from accelerate import cpu_offload

            cpu_offload(attention_module(student, layer), device)
    return student
