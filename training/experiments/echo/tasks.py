"""Synthetic retrieval tasks of the Echo paper: facts among noise, then questions; the answer is one of 50 values.

    system_prompt   k = v ;  (n times)      noise                      ? k =                -> v
    tool_trace      caller : tool result    anywhere in the noise      ? caller : tool =    -> result
    niah            k = v ;                 once, anywhere             ? k =                -> v
    multi_hop       k1 = k2 ;  k2 = v ;     n chains, anywhere         ? k1 =               -> v
    common_word     k = w ;                 n words, one three times   ? k =                -> the word written most
    mqar            k = v ;  (n times)      questions for all n, anywhere after them

Paper: "Echo: KV-Cache-Free Associative Recall with Spectral Koopman Operators", section 4.1 and its appendix, which
name the tasks and their formats but publish no generators: lengths, noise and vocabulary are chosen here. An answer
never enters the input. A chain of two facts and a word written three times are asked for in the words of the first two
tasks, on which alone models are trained, or no untrained model could know what is asked.
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
QUESTIONS = 4  # of a system prompt or a tool trace
SPARE = 2  # how much oftener the common word is written than each other one


@dataclass(frozen=True)
class Examples(Recall):
    """A batch: `ids` [B, L], position and answer of every question [B, n], and which tokens are facts [B, L] bool."""

    action_mask: Tensor

    def __getitem__(self, rows) -> "Examples":
        return Examples(*(t[rows] for t in (self.ids, self.positions, self.values, self.action_mask)))


@dataclass(frozen=True)
class _Layout:
    """Facts [B, f, 4] and where they start [B, f]; questions [B, q, w] and where; answers [B, q]."""

    facts: Tensor
    fact_starts: Tensor
    questions: Tensor
    question_starts: Tensor
    answers: Tensor


class _Draw:
    """Random parts of a batch of sequences, on the generator's device."""

    def __init__(self, batch: int, length: int, gap: int, generator: torch.Generator):
        self.batch, self.length, self.gap = batch, length, gap
        self.place = {"generator": generator, "device": generator.device}

    def different(self, population: range, count: int) -> Tensor:
        """`count` different members for each sequence [B, count], in random order."""
        noise = torch.rand(self.batch, len(population), **self.place)
        return noise.topk(count).indices + population.start

    def any(self, population: range, *shape: int) -> Tensor:
        return torch.randint(population.start, population.stop, (self.batch, *shape), **self.place)

    def order(self, items: Tensor) -> Tensor:
        """The items [B, n, ...] of each sequence in random order."""
        order = torch.rand(items.shape[:2], **self.place).argsort()
        return items.gather(1, order.view(*order.shape, *[1] * (items.dim() - 2)).expand_as(items))

    def spread(self, count: int, width: int, start: int, stop: int) -> Tensor:
        """Where `count` pieces of `width` tokens start [B, count], anywhere in start .. stop without overlap."""
        free = stop - start - count * width
        gaps = torch.randint(free + 1, (self.batch, count), **self.place).sort(-1).values
        return start + gaps + width * torch.arange(count, device=gaps.device)

    def last(self, count: int, width: int) -> Tensor:
        """Where `count` pieces at the end of the sequence start [B, count]."""
        return self.spread(count, width, self.length - count * width, self.length)


def _row(*parts: Tensor | int) -> Tensor:
    """Tokens [B, n, w] of w parts [B, n]; a number is the same token everywhere."""
    shape = next(p.shape for p in parts if isinstance(p, Tensor))
    like = next(p for p in parts if isinstance(p, Tensor))
    return torch.stack([p if isinstance(p, Tensor) else like.new_full(shape, p) for p in parts], -1)


def _asked(draw: _Draw, *facts: Tensor) -> tuple[Tensor, ...]:
    """For `QUESTIONS` questions the same random facts of each tensor [B, n]."""
    which = draw.any(range(facts[0].shape[1]), QUESTIONS)
    return tuple(fact.gather(1, which) for fact in facts)


def _system_prompt(draw: _Draw, pairs: int) -> _Layout:
    keys, values = draw.different(KEYS, pairs), draw.any(VALUES, pairs)
    asked, answers = _asked(draw, keys, values)
    questions = _row(QUESTION, asked, EQUALS)
    starts = draw.spread(pairs, FACT, 0, pairs * FACT)
    return _Layout(_row(keys, EQUALS, values, END), starts, questions, draw.last(QUESTIONS, 3), answers)


def _tool_trace(draw: _Draw, pairs: int) -> _Layout:
    tools = len(KEYS) - CALLERS
    calls = draw.different(range(CALLERS * tools), pairs)
    callers, tools = KEYS.start + calls // tools, KEYS.start + CALLERS + calls % tools
    results = draw.any(VALUES, pairs)
    *asked, answers = _asked(draw, callers, tools, results)
    questions = _row(QUESTION, asked[0], COLON, asked[1], EQUALS)
    starts = draw.spread(pairs, FACT, 0, draw.length - QUESTIONS * 5)
    return _Layout(_row(callers, COLON, tools, results), starts, questions, draw.last(QUESTIONS, 5), answers)


def _anywhere(draw: _Draw, facts: Tensor, asked: Tensor, answers: Tensor) -> _Layout:
    count = asked.shape[1]
    starts = draw.spread(facts.shape[1], FACT, 0, draw.length - 3 * count)
    return _Layout(draw.order(facts), starts, _row(QUESTION, asked, EQUALS), draw.last(count, 3), answers)


def _niah(draw: _Draw, pairs: int) -> _Layout:
    keys, values = draw.different(KEYS, pairs), draw.any(VALUES, pairs)
    return _anywhere(draw, _row(keys, EQUALS, values, END), keys, values)


def _multi_hop(draw: _Draw, pairs: int) -> _Layout:
    keys, values = draw.different(KEYS, 2 * pairs), draw.any(VALUES, pairs)
    first, second = keys.chunk(2, 1)
    facts = torch.cat([_row(first, EQUALS, second, END), _row(second, EQUALS, values, END)], 1)
    return _anywhere(draw, facts, first[:, :1], values[:, :1])


def _common_word(draw: _Draw, pairs: int) -> _Layout:
    key, words = draw.different(KEYS, 1), draw.different(VALUES, pairs)
    written = torch.cat([words, words[:, :1].expand(-1, SPARE)], 1)
    return _anywhere(draw, _row(key.expand_as(written), EQUALS, written, END), key, words[:, :1])


def _mqar(draw: _Draw, pairs: int) -> _Layout:
    keys, values = draw.different(KEYS, pairs), draw.any(VALUES, pairs)
    both = draw.order(torch.stack([keys, values], -1))
    starts = draw.spread(pairs, 3, pairs * FACT + draw.gap, draw.length)
    facts = _row(keys, EQUALS, values, END)
    return _Layout(
        facts, draw.spread(pairs, FACT, 0, pairs * FACT), _row(QUESTION, both[..., 0], EQUALS), starts, both[..., 1]
    )


# task: how it is laid out, and the tokens of its facts and questions with n pairs
TASKS = {
    "system_prompt": (_system_prompt, lambda n: n * FACT + QUESTIONS * 3),
    "tool_trace": (_tool_trace, lambda n: n * FACT + QUESTIONS * 5),
    "niah": (_niah, lambda n: n * (FACT + 3)),
    "multi_hop": (_multi_hop, lambda n: 2 * n * FACT + 3),
    "common_word": (_common_word, lambda n: (n + SPARE) * FACT + 3),
    "mqar": (_mqar, lambda n: n * (FACT + 3)),
}
MAX_PAIRS = {"multi_hop": len(KEYS) // 2, "common_word": len(VALUES), "niah": 1}


def check_task(task: str, length: int, pairs: int, gap: int = 0) -> None:
    """Raise ValueError unless sequences of `length` have room for `pairs` facts of the task and their questions."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known: {sorted(TASKS)}")
    most = MAX_PAIRS.get(task, len(KEYS))
    if not 1 <= pairs <= most:
        raise ValueError(f"{task} has 1 to {most} pairs, not {pairs}")
    if gap and task != "mqar":
        raise ValueError(f"gap={gap} is an option of mqar, not of {task}")
    if length < (room := TASKS[task][1](pairs) + gap):
        raise ValueError(
            f"{task} with {pairs} pairs and a gap of {gap} needs a length of at least {room}, not {length}"
        )


def draw_examples(
    task: str, batch: int, length: int, pairs: int, generator: torch.Generator, *, gap: int = 0
) -> Examples:
    """One batch on the generator's device.

    Args:
        pairs: n of the task's facts; chains of multi_hop, different words of common_word.
        gap: tokens between the facts of mqar and its first question, at least.

    Raises:
        ValueError: see `check_task`.
    """
    check_task(task, length, pairs, gap)
    draw = _Draw(batch, length, gap, generator)
    layout = TASKS[task][0](draw, pairs)
    ids = draw.any(NOISE, length)
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
    """`batches` batches, each sequence of one of the tasks with one of the numbers of pairs, in equal parts at random.

    Raises:
        ValueError: see `check_task`; or the tasks ask different numbers of questions.
    """
    kinds = [(task, n) for task in tasks for n in pairs]
    total = batch * batches
    share = -(-total // len(kinds))
    drawn = [draw_examples(task, share, length, n, generator) for task, n in kinds]
    if len({part.values.shape[1] for part in drawn}) > 1:
        raise ValueError(f"tasks {tasks} with {pairs} pairs ask different numbers of questions in a sequence")
    fields = (torch.cat(f) for f in zip(*((d.ids, d.positions, d.values, d.action_mask) for d in drawn), strict=True))
    order = torch.randperm(share * len(kinds), generator=generator, device=generator.device)[:total]
    return [Examples(*part) for part in zip(*(f[order].split(batch) for f in fields), strict=True)]
