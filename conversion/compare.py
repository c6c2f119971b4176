"""How far a student is from its teacher: perplexity, agreement of the most likely token, error of every mixer."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_memmix.conversion.limits import check_length, check_vocabularies, check_vocabulary, limit_of
from hf_memmix.conversion.logits import logits_head
from hf_memmix.conversion.model_files import check_converted
from hf_memmix.conversion.teacher_forcing import run_teacher_forced
from hf_memmix.conversion.text_rows import beginning_of, cut_rows, encode
from hf_memmix.errors import UserError
from hf_memmix_kernels._common import exact


def compare_models(
    student: nn.Module,
    teacher: nn.Module,
    text: str | Tensor,
    tokenizer=None,
    *,
    block_size: int = 512,
    batch_size: int = 8,
    max_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Compare both models on a text, which is cut into blocks.

    Args:
        text: a string, which needs `tokenizer`, or token ids [N].
        tokenizer: if it puts tokens before a text (BOS), every block begins with them. They are not predicted.
        block_size: tokens per block. No token is predicted from another block.
        batch_size: blocks that are computed together.
        max_tokens: number of tokens to read; None reads all.
        progress: `progress(done, total)` is called after every batch.

    Returns:
        `tokens` (the number of predicted tokens), `teacher_ppl`, `student_ppl`, `ppl_ratio`, `top1_agreement`,
        `kl` (KL(teacher || student) in nats per token) and `layer_error`: for each memory layer
        ||mixer - attention||^2 / ||attention||^2 on the inputs of the teacher's layers.

    Raises:
        ValueError: the text is too short or has unknown tokens, the student is not converted, the vocabularies
            differ, or a block is longer than the teacher allows.
    """
    tokens, beginning = _tokens(text, tokenizer)[:max_tokens], beginning_of(tokenizer)
    check_pair(student, teacher, tokens, block_size)
    training = student.training, teacher.training
    student.eval(), teacher.eval()
    try:
        return _compare(student, teacher, blocks_of(tokens, block_size, batch_size, beginning), beginning, progress)
    finally:
        student.train(training[0]), teacher.train(training[1])


def check_pair(student: nn.Module, teacher: nn.Module, tokens: Tensor, block_size: int) -> None:
    """Raise the ValueErrors of `compare_models`. Reads no weights."""
    if len(tokens) < 2:
        raise UserError(f"the text has {len(tokens)} tokens; perplexity needs at least 2")
    check_converted(student.config.to_dict())
    check_vocabularies(student, teacher)
    if len(tokens) > limit_of(teacher):
        check_length(teacher, "teacher", block_size, "block_size", "give a smaller block")
    check_vocabulary(tokens, student.config.vocab_size)


@torch.no_grad()
def _compare(student: nn.Module, teacher: nn.Module, batches: list[Tensor], beginning: list[int], progress) -> dict:
    device = student.get_input_embeddings().weight.device
    heads = {"student": logits_head(student), "teacher": logits_head(teacher)}
    nll = {"student": 0.0, "teacher": 0.0}
    agree, kl, count = 0, 0.0, 0
    errors = LayerErrors()

    for done, batch in enumerate(batches, 1):
        batch = batch.to(device)
        hidden = {
            "teacher": run_teacher_forced(teacher, student, batch, errors.add),
            "student": student.base_model(input_ids=batch, use_cache=False).last_hidden_state,
        }
        sums = exact(torch.zeros(len(heads) + 2, device=device))  # read once: each reading waits for a GPU
        for row in range(len(batch)):  # logits of one row at a time
            places, targets = targets_of(batch[row], beginning)
            logp = {name: heads[name](hidden[name][row, places]).float().log_softmax(-1) for name in heads}
            losses = [-exact(logp[name].gather(-1, targets[:, None])).sum() for name in heads]
            same = (logp["student"].argmax(-1) == logp["teacher"].argmax(-1)).sum()
            divergence = (logp["teacher"].exp() * (logp["teacher"] - logp["student"])).sum()
            sums += torch.stack([*losses, exact(same), exact(divergence)])
            count += len(targets)
        *losses, same, divergence = sums.tolist()
        for name, loss in zip(heads, losses, strict=True):
            nll[name] += loss
        agree, kl = agree + round(same), kl + divergence
        if progress is not None:
            progress(done, len(batches))

    return figures_of(count, nll, agree, kl, errors.of_layers())


def figures_of(count: int, nll: dict[str, float], agree: int, kl: float, layer_error: dict[int, float]) -> dict:
    """The result of `compare_models` from sums over `count` tokens; `nll` has those of "teacher" and of "student"."""
    # torch's exp gives inf where math.exp raises
    ppl = {name: torch.tensor(total / count, dtype=torch.float64).exp().item() for name, total in nll.items()}
    return {
        "tokens": count,
        "teacher_ppl": ppl["teacher"],
        "student_ppl": ppl["student"],
        "ppl_ratio": ppl["student"] / ppl["teacher"],
        "top1_agreement": agree / count,
        "kl": kl / count,
        "layer_error": layer_error,
    }


class LayerErrors:
    """||mixer - attention||^2 / ||attention||^2 of each layer, over all outputs [B, T, hidden] added to it.

    The sums stay on the layers' devices until they are asked for.
    """

    def __init__(self):
        self.error, self.size = Counter(), Counter()

    def add(self, layer: int, ours: Tensor, theirs: Tensor) -> None:
        theirs = theirs.to(ours.device)
        self.error[layer] += exact((ours.float() - theirs.float()).square().sum())
        self.size[layer] += exact(theirs.float().square().sum())

    def of_layers(self) -> dict[int, float]:
        return {i: float(self.error[i]) / max(float(self.size[i]), 1e-12) for i in sorted(self.error)}


def _tokens(text: str | Tensor, tokenizer) -> Tensor:
    if isinstance(text, Tensor):
        return text.flatten()
    if tokenizer is None:
        raise UserError("a text needs its tokenizer; give tokenizer=, or a tensor of token ids")
    return torch.tensor(beginning_of(tokenizer) + encode(text, tokenizer), dtype=torch.long)


def targets_of(ids: Tensor, beginning: list[int]) -> tuple[Tensor | slice, Tensor]:
    """The places of a row [T] behind which a token is predicted, and these tokens: none that begin a text."""
    if not beginning:
        return slice(0, -1), ids[1:]
    places = (~torch.isin(ids[1:], torch.tensor(beginning, device=ids.device))).nonzero()[:, 0]
    return places, ids[1:][places]


def blocks_of(tokens: Tensor, block_size: int, batch_size: int, beginning: list[int]) -> list[Tensor]:
    """Batches of full blocks, then the shorter rest alone. `beginning`: what every block begins with."""
    if beginning:
        rows = [torch.tensor(row) for row, _ in cut_rows([tokens.tolist()], block_size, beginning)]
        rest = [rows.pop()[None]] if len(rows[-1]) < block_size else []
        return [torch.stack(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)] + rest
    full = len(tokens) // block_size
    batches = list(tokens[: full * block_size].view(full, block_size).split(batch_size)) if full else []
    return batches + ([tokens[None, full * block_size :]] if len(tokens) - full * block_size > 1 else [])
