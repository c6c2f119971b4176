"""Scores the answers of a model, with teacher forcing: one forward per sequence, logits of answer tokens only."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_memmix._transformers import execution_device
from hf_memmix.conversion.logits import logits_head
from hf_memmix.errors import UserError
from hf_memmix.training.evaluation.probes.material import Answer, Sample

CHUNK_LOGITS = 2**25  # number of logits of answer tokens that are in memory at a time


@dataclass(frozen=True)
class Scores:
    """The scores of one answer.

    nll: nats per token.
    exact: whether every token of the answer has the highest probability.
    choice: whether its first token is the likeliest one among the candidates' first tokens; None without candidates.
    gain: nll in the control minus nll; None if the control was not read, or has the same answer in its context.
    sequence: the number of its sequence in the list of samples. Answers of one sequence are not independent.
    generated: whether the model gives the answer when it generates, see `generated_answers`; None if it did not.
    """

    answer: Answer
    nll: float
    exact: bool
    choice: bool | None
    gain: float | None
    sequence: int = 0
    generated: bool | None = None


@torch.no_grad()
def score(model: nn.Module, samples: list[Sample], batch_size: int = 8, control: bool = True) -> list[Scores]:
    """Scores of all answers of `samples`, in their order; all samples have the same length.

    control: whether the controls of the samples are read, too.

    Raises:
        ValueError: the samples have tokens that are not in the model's vocabulary.
    """
    highest = max((max(sample.ids) for sample in samples), default=0)
    if highest >= model.config.vocab_size:
        raise UserError(
            f"token {highest} is outside the vocabulary of {model.config.vocab_size}; use the model's own tokenizer"
        )
    head, device = logits_head(model), execution_device(model.get_input_embeddings())
    scores, training = [], model.training
    model.eval()
    try:
        for begin in range(0, len(samples), batch_size):
            batch = samples[begin : begin + batch_size]
            results = _look(model, head, [sample.ids for sample in batch], batch, device)
            control_results = (
                _look(model, head, [sample.control for sample in batch], batch, device) if control else None
            )
            at = 0
            for row, answer in ((row, answer) for row, sample in enumerate(batch) for answer in sample.answers):
                span = slice(at, at + answer.stop - answer.start)
                at = span.stop
                tokens, nll = results[span], _nll(results[span])
                gain = _nll(control_results[span]) - nll if control and answer.replaced else None
                exact, choice = all(token[1] for token in tokens), tokens[0][2]
                scores.append(Scores(answer, nll, exact, choice, gain, begin + row))
    finally:
        model.train(training)
    return scores


@torch.no_grad()
def nll_of_answers(model: nn.Module, head, hidden: Tensor, batch: list[Sample]) -> list[float]:
    """The `Scores.nll` of all answers of a batch from the last hidden states [B, T, hidden] of its sequences.

    head: `logits_head(model)`.
    """
    results, found = iter(_answer_tokens(model, head, hidden, batch)), []
    for answer in (answer for sample in batch for answer in sample.answers):
        found.append(_nll([next(results) for _ in range(answer.start, answer.stop)]))
    return found


def _nll(rows: list[tuple]) -> float:
    return -sum(row[0] for row in rows) / len(rows)


def _look(model: nn.Module, head, rows: list[list[int]], batch: list[Sample], device) -> list[tuple]:
    hidden = model.base_model(input_ids=torch.tensor(rows, device=device), use_cache=False).last_hidden_state
    return _answer_tokens(model, head, hidden, batch)


def _answer_tokens(model: nn.Module, head, hidden: Tensor, batch: list[Sample]) -> list[tuple]:
    """For every answer token: its log probability, whether it is the likeliest token, and whether it is the likeliest
    candidate (None without candidates).
    """
    places = [(row, at, a) for row, s in enumerate(batch) for a in s.answers for at in range(a.start, a.stop)]
    found = []
    size = max(1, CHUNK_LOGITS // model.config.vocab_size)
    for begin in range(0, len(places), size):
        chunk = places[begin : begin + size]
        logp = head(hidden[[row for row, _, _ in chunk], [at - 1 for _, at, _ in chunk]]).float().log_softmax(-1)
        tokens = torch.tensor([batch[row].ids[at] for row, at, _ in chunk], device=logp.device)
        picked = logp.gather(1, tokens[:, None])[:, 0].tolist()
        right = (logp.argmax(-1) == tokens).tolist()
        chosen = _likeliest_candidates(logp, [a.candidates if at == a.start else () for _, at, a in chunk])
        for i, (row, at, _) in enumerate(chunk):
            found.append((picked[i], right[i], None if chosen[i] is None else chosen[i] == batch[row].ids[at]))
    return found


def _likeliest_candidates(logp: Tensor, candidates: list[tuple[int, ...]]) -> list[int | None]:
    """The likeliest token among the candidates of each row of logp [N, V]; None for a row without candidates.

    All rows are read at once, because every value that is read from a GPU waits for it.
    """
    rows = [i for i, tokens in enumerate(candidates) if tokens]
    chosen: list[int | None] = [None] * len(candidates)
    if rows:
        width = max(len(candidates[i]) for i in rows)
        # shorter rows repeat their first token, which does not change what is likeliest
        table = torch.tensor([candidates[i] + candidates[i][:1] * (width - len(candidates[i])) for i in rows])
        best = logp[rows].gather(1, table.to(logp.device)).argmax(-1).tolist()
        for row, place in zip(rows, best, strict=True):
            chosen[row] = candidates[row][place] if place < len(candidates[row]) else candidates[row][0]
    return chosen
