"""Synthetic retrieval tasks of the Echo paper. A sequence has facts, noise and then questions; 50 values can be
answers.

    task            facts                   where the facts stand      question             answer
    system_prompt   k = v ;  (n times)      at the start               ? k =                -> v
    tool_trace      caller : tool result    anywhere in the noise      ? caller : tool =    -> result
    niah            k = v ;                 once, anywhere             ? k =                -> v
    multi_hop       k1 = k2 ;  k2 = v ;     n chains, anywhere         ? k1 =               -> v
    common_word     k = w ;                 n words, one three times   ? k =                -> the word written most
    mqar            k = v ;  (n times)      at the start               ? k =, all n         -> v

Paper: "Echo: KV-Cache-Free Associative Recall with Spectral Koopman Operators", section 4.1 and its appendix. They
describe the tasks and their formats but publish no generators, so lengths, noise and vocabulary are chosen here. The
questions of a sequence are not followed by their answers. Models are trained on the first two tasks only. Therefore
multi_hop and common_word use the question format of these tasks; a model that has not seen a format cannot answer in
it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_memmix.training.experiments.common.mqar import Recall

VOCAB = 256
EQUALS, END, QUESTION, COLON = 1, 2, 3, 4
KEYS, VALUES, NOISE = range(16, 80), range(80, 130), range(130, 256)
CALLERS = 8  # the first keys, the others are tools
FACT = 4  # tokens
QUESTIONS = 4  # per sequence of system_prompt or tool_trace
EXTRA_COMMON_WORDS = 2  # the common word is written this many times more than each other word


@dataclass(frozen=True)
class Examples(Recall):
    """A batch: token ids [B, L], positions and answers of the questions [B, n], and `action_mask` [B, L] bool.

    The action mask is True at the tokens of facts.
    """

    action_mask: Tensor

    def __getitem__(self, rows) -> "Examples":
        return Examples(*(t[rows] for t in (self.ids, self.positions, self.values, self.action_mask)))


@dataclass(frozen=True)
class _Layout:
    """Facts [B, f, 4], their first positions [B, f], questions [B, q, w], first positions of these, answers [B, q]."""

    facts: Tensor
    fact_starts: Tensor
    questions: Tensor
    question_starts: Tensor
    answers: Tensor


class _Sampler:
    """Draws random tokens and positions for a batch of sequences, on the generator's device."""

    def __init__(self, batch: int, length: int, generator: torch.Generator):
        self.batch, self.length = batch, length
        self.place = {"generator": generator, "device": generator.device}

    def distinct_tokens(self, population: range, count: int) -> Tensor:
        """`count` different tokens of the population for each sequence [B, count], in random order."""
        noise = torch.rand(self.batch, len(population), **self.place)
        return noise.topk(count).indices + population.start

    def tokens(self, population: range, *shape: int) -> Tensor:
        return torch.randint(population.start, population.stop, (self.batch, *shape), **self.place)

    def shuffle(self, items: Tensor) -> Tensor:
        """The items [B, n, ...] of each sequence in random order."""
        order = torch.rand(items.shape[:2], **self.place).argsort()
        return items.gather(1, order.view(*order.shape, *[1] * (items.dim() - 2)).expand_as(items))

    def starts_between(self, count: int, width: int, start: int, stop: int) -> Tensor:
        """Random first positions [B, count] of `count` pieces of `width` tokens in start .. stop, without overlap."""
        free = stop - start - count * width
        gaps = torch.randint(free + 1, (self.batch, count), **self.place).sort(-1).values
        return start + gaps + width * torch.arange(count, device=gaps.device)

    def starts_at_end(self, count: int, width: int) -> Tensor:
        """First positions [B, count] of `count` pieces that fill the end of the sequence."""
        return self.starts_between(count, width, self.length - count * width, self.length)


def _stack_tokens(*parts: Tensor | int) -> Tensor:
    """Tokens [B, n, w] from w parts: a part is a tensor [B, n] or one token id that is repeated."""
    shape = next(p.shape for p in parts if isinstance(p, Tensor))
    like = next(p for p in parts if isinstance(p, Tensor))
    return torch.stack([p if isinstance(p, Tensor) else like.new_full(shape, p) for p in parts], -1)


def _draw_questions(sampler: _Sampler, *facts: Tensor) -> tuple[Tensor, ...]:
    """Choose `QUESTIONS` random facts per sequence and gather them from each tensor [B, n]."""
    which = sampler.tokens(range(facts[0].shape[1]), QUESTIONS)
    return tuple(fact.gather(1, which) for fact in facts)


def _system_prompt(sampler: _Sampler, pairs: int) -> _Layout:
    keys, values = sampler.distinct_tokens(KEYS, pairs), sampler.tokens(VALUES, pairs)
    asked, answers = _draw_questions(sampler, keys, values)
    questions = _stack_tokens(QUESTION, asked, EQUALS)
    starts = sampler.starts_between(pairs, FACT, 0, pairs * FACT)
    return _Layout(
        _stack_tokens(keys, EQUALS, values, END), starts, questions, sampler.starts_at_end(QUESTIONS, 3), answers
    )


def _tool_trace(sampler: _Sampler, pairs: int) -> _Layout:
    tools = len(KEYS) - CALLERS
    calls = sampler.distinct_tokens(range(CALLERS * tools), pairs)
    callers, tools = KEYS.start + calls // tools, KEYS.start + CALLERS + calls % tools
    results = sampler.tokens(VALUES, pairs)
    *asked, answers = _draw_questions(sampler, callers, tools, results)
    questions = _stack_tokens(QUESTION, asked[0], COLON, asked[1], EQUALS)
    starts = sampler.starts_between(pairs, FACT, 0, sampler.length - QUESTIONS * 5)
    return _Layout(
        _stack_tokens(callers, COLON, tools, results), starts, questions, sampler.starts_at_end(QUESTIONS, 5), answers
    )


def _facts_anywhere(sampler: _Sampler, facts: Tensor, asked: Tensor, answers: Tensor) -> _Layout:
    count = asked.shape[1]
    starts = sampler.starts_between(facts.shape[1], FACT, 0, sampler.length - 3 * count)
    return _Layout(
        sampler.shuffle(facts),
        starts,
        _stack_tokens(QUESTION, asked, EQUALS),
        sampler.starts_at_end(count, 3),
        answers,
    )


def _niah(sampler: _Sampler, pairs: int) -> _Layout:
    keys, values = sampler.distinct_tokens(KEYS, pairs), sampler.tokens(VALUES, pairs)
    return _facts_anywhere(sampler, _stack_tokens(keys, EQUALS, values, END), keys, values)


def _multi_hop(sampler: _Sampler, pairs: int) -> _Layout:
    keys, values = sampler.distinct_tokens(KEYS, 2 * pairs), sampler.tokens(VALUES, pairs)
    first, second = keys.chunk(2, 1)
    facts = torch.cat([_stack_tokens(first, EQUALS, second, END), _stack_tokens(second, EQUALS, values, END)], 1)
    return _facts_anywhere(sampler, facts, first[:, :1], values[:, :1])


def _common_word(sampler: _Sampler, pairs: int) -> _Layout:
    key, words = sampler.distinct_tokens(KEYS, 1), sampler.distinct_tokens(VALUES, pairs)
    written = torch.cat([words, words[:, :1].expand(-1, EXTRA_COMMON_WORDS)], 1)
    return _facts_anywhere(sampler, _stack_tokens(key.expand_as(written), EQUALS, written, END), key, words[:, :1])


def _mqar(sampler: _Sampler, pairs: int) -> _Layout:
    keys, values = sampler.distinct_tokens(KEYS, pairs), sampler.tokens(VALUES, pairs)
    both = sampler.shuffle(torch.stack([keys, values], -1))
    starts = sampler.starts_between(pairs, 3, pairs * FACT, sampler.length)
    facts = _stack_tokens(keys, EQUALS, values, END)
    return _Layout(
        facts,
        sampler.starts_between(pairs, FACT, 0, pairs * FACT),
        _stack_tokens(QUESTION, both[..., 0], EQUALS),
        starts,
        both[..., 1],
    )


# the name of a task: the function that draws its layout, and the number of tokens of its facts and questions with n
# pairs
TASKS = {
    "system_prompt": (_system_prompt, lambda n: n * FACT + QUESTIONS * 3),
    "tool_trace": (_tool_trace, lambda n: n * FACT + QUESTIONS * 5),
    "niah": (_niah, lambda n: n * (FACT + 3)),
    "multi_hop": (_multi_hop, lambda n: 2 * n * FACT + 3),
    "common_word": (_common_word, lambda n: (n + EXTRA_COMMON_WORDS) * FACT + 3),
    "mqar": (_mqar, lambda n: n * (FACT + 3)),
}
MAX_PAIRS = {"multi_hop": len(KEYS) // 2, "common_word": len(VALUES), "niah": 1}


def check_task(task: str, length: int, pairs: int) -> None:
    """Raise ValueError unless `pairs` facts of the task and their questions fit into sequences of `length` tokens."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known: {sorted(TASKS)}")
    most = MAX_PAIRS.get(task, len(KEYS))
    if not 1 <= pairs <= most:
        raise ValueError(f"{task} takes 1 to {most} pairs, not {pairs}")
    if length < (room := TASKS[task][1](pairs)):
        raise ValueError(f"{task} with {pairs} pairs needs a length of at least {room}, not {length}")


def draw_examples(task: str, batch: int, length: int, pairs: int, generator: torch.Generator) -> Examples:
    """One batch on the generator's device.

    Args:
        pairs: number n of facts; for multi_hop the number of chains, for common_word the number of different words.

    Raises:
        ValueError: see `check_task`.
    """
    check_task(task, length, pairs)
    sampler = _Sampler(batch, length, generator)
    layout = TASKS[task][0](sampler, pairs)
    ids = sampler.tokens(NOISE, length)
    action_mask = torch.zeros_like(ids, dtype=torch.bool)
    for pieces, starts in ((layout.facts, layout.fact_starts), (layout.questions, layout.question_starts)):
        places = (starts[..., None] + torch.arange(pieces.shape[-1], device=ids.device)).flatten(1)
        ids.scatter_(1, places, pieces.flatten(1))
        if pieces is layout.facts:
            action_mask.scatter_(1, places, True)
    last = layout.question_starts + layout.questions.shape[-1] - 1
    return Examples(ids, last, layout.answers, action_mask)


def mixture(
    tasks: list[str], batch: int, length: int, pairs: list[int], generator: torch.Generator, batches: int
) -> list[Examples]:
    """`batches` batches that mix all tasks with all numbers of pairs, in equal parts and in random order.

    Raises:
        ValueError: see `check_task`; or the tasks have different numbers of questions per sequence.
    """
    kinds = [(task, n) for task in tasks for n in pairs]
    total = batch * batches
    share = -(-total // len(kinds))
    drawn = [draw_examples(task, share, length, n, generator) for task, n in kinds]
    if len({part.values.shape[1] for part in drawn}) > 1:
        raise ValueError(f"tasks {tasks} with {pairs} pairs have different numbers of questions per sequence")
    fields = (torch.cat(f) for f in zip(*((d.ids, d.positions, d.values, d.action_mask) for d in drawn), strict=True))
    order = torch.randperm(share * len(kinds), generator=generator, device=generator.device)[:total]
    return [Examples(*part) for part in zip(*(f[order].split(batch) for f in fields), strict=True)]
