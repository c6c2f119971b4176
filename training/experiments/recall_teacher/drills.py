"""Training sequences of recall, in the formats of the probes, with other keys and values than the probes have.

A drill holds statements and questions in filler text. It has more questions than a probe, so that a token of training
has more answers: passwords and lines of a dictionary, pairs of keys and values (MQAR), and chains of variables of up
to two hops. Rows of training are packed: each drill ends with the end-of-text token.

No key or value of a drill begins with the first token of a probe's key or value. So the probes ask for words that the
model has only read in text.
"""

import random
import re
from collections import Counter
from collections.abc import Callable

import numpy
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from hf_memmix.training.evaluation.probes import Material
from hf_memmix.training.evaluation.probes.material import MAX_WORD_TOKENS
from hf_memmix.training.evaluation.probes.tasks import (
    HOPS,
    PAIR_LINE,
    has_the_same,
    has_value,
    password_of,
    question_of_chain,
    sentence,
    sentence_end,
)

SHORTEST = 96  # tokens of a drill
AT_THE_START = 0.1  # share of the first statements that stand at the start of their drill
ALONE = 0.25  # share of the rows that are one long drill
ANSWERED = 8  # a drill with more answers than this has the weight of so many
WORD_TEXT = 700_000  # tokens of the training text from which keys and values are taken
LONGEST_PAIR = 2 * MAX_WORD_TOKENS + 2  # tokens
Word = tuple[str, tuple[int, ...]]
# an event of a drill: its place from 0 to 1, its tokens, and the number of tokens before and of an answer in it
Event = tuple[float, list[int], tuple[int, int] | None]


class DrillMaterial(Material):
    """Filler, keys and values of the training text `tokens` [N], without the words of the probes of `avoid`."""

    def __init__(self, tokenizer, tokens: numpy.ndarray, avoid: Material):
        text = tokenizer.decode(tokens[:WORD_TEXT].tolist())
        # as in `Material`, but the tokens are known, and there may be any number of keys and values
        self.tokenizer, self._words, self._pieces, self.start = tokenizer, {}, {}, []
        self.filler, self.end = tokens, tokenizer.eos_token_id
        counts = Counter(re.findall(r"[A-Za-z]{3,}", text))
        words = [word for word, count in counts.items() if count > 1 and (word.istitle() or word.islower())]
        encoded = tokenizer([" " + word for word in words], add_special_tokens=False)["input_ids"]
        taken = {tokens[0] for pool in (avoid.keys, avoid.values) for _, tokens in pool}
        pool = [(w, tuple(ids)) for w, ids in zip(words, encoded, strict=True) if len(ids) <= MAX_WORD_TOKENS]
        self.keys = [word for word in pool if word[1][0] not in taken]
        self.names = [word for word in self.keys if word[0].istitle()]
        self.values = [word for word in self.keys if word[0].islower()]

    def window(self, length: int, draw: random.Random) -> list[int]:
        start = draw.randrange(max(1, len(self.filler) - length))
        return self.filler[start : start + length].tolist()


def place_of(draw: random.Random) -> float:
    """A random place; often the very start, where a model attends in another way than elsewhere."""
    return 0.0 if draw.random() < AT_THE_START else draw.random()


def passwords(material: DrillMaterial, length: int, draw: random.Random) -> tuple[list[int], list[tuple[int, int]]]:
    count = draw.randint(1, max(1, min(12, length // 48)))
    events: list[Event] = []
    for key in draw.sample(material.names if draw.random() < 0.7 else material.keys, count):
        value, place = draw.choice(material.values), place_of(draw)
        start = [*password_of(material, key)]
        text = [*start, *value[1], *material.piece(".")]
        events.append((place, text, None))
        for _ in range(draw.choice((1, 1, 2))):
            where = 1.0 if draw.random() < 0.6 else place + (1 - place) * draw.random()
            events.append((where, text, (len(start), len(value[1]))))
    return woven(material, length, events, draw)


def chains(material: DrillMaterial, length: int, draw: random.Random) -> tuple[list[int], list[tuple[int, int]]]:
    count = draw.randint(2, max(2, min(6, length // 40)))
    names = draw.sample(material.names if draw.random() < 0.7 else material.keys, count * (HOPS + 1))
    values = draw.sample(material.values, count)
    events: list[Event] = []
    for value in values:
        chain, names = names[: HOPS + 1], names[HOPS + 1 :]
        begin = place_of(draw)
        hops = HOPS if draw.random() < 0.7 else draw.randrange(HOPS)
        events.append((begin, [*has_value(material, chain[0], value)], None))
        for hop in range(1, hops + 1):
            text = [*has_the_same(material, chain[hop], chain[hop - 1])]
            events.append((begin + (1 - begin) * hop / (HOPS + 1), text, None))
        for asked in (hops, *([draw.randint(0, hops)] if draw.random() < 0.3 else [])):
            question = [*question_of_chain(material, chain[asked])]
            text = [*question, *value[1], *material.piece(".")]
            events.append((1.0 + draw.random(), text, (len(question), len(value[1]))))
    return woven(material, length, events, draw)


def lines(material: DrillMaterial, length: int, draw: random.Random) -> tuple[list[int], list[tuple[int, int]]]:
    """A dictionary at the end of the filler, and questions about some of its lines."""
    pairs, texts = _pairs(material, draw.uniform(0.2, 0.85) * length, length // 4, draw, *PAIR_LINE)
    asked = draw.sample(range(len(pairs)), min(len(pairs), draw.randint(2, 8)))
    tail, spans = [], []
    for i in asked:
        key, value = pairs[i]
        start = len(tail) + len(sentence(material, key, PAIR_LINE[0]))
        tail += texts[i]
        spans.append((start, start + len(value[1])))
    return _after(material, length, [t for text in texts for t in text], [], tail, spans, draw)


def pairs_again(material: DrillMaterial, length: int, draw: random.Random) -> tuple[list[int], list[tuple[int, int]]]:
    """Pairs, filler of any length, and the same pairs in another order."""
    pairs, texts = _pairs(material, draw.uniform(0.25, 1.0) * length / 2 - 8, length, draw)
    tail, spans = [], []
    for i in draw.sample(range(len(pairs)), len(pairs)):
        tail += texts[i]
        spans.append((len(tail) - len(pairs[i][1][1]), len(tail)))
    body = [t for text in texts for t in text]
    rest = length - 1 - len(body) - len(tail)
    gap = draw.choice((0, rest, draw.randint(0, rest)))
    return _after(material, length, body, material.window(gap, draw), tail, spans, draw)


DRILLS: dict[str, tuple[Callable, float]] = {  # with their shares of the tokens
    "passwords": (passwords, 0.25),
    "chains": (chains, 0.35),
    "lines": (lines, 0.15),
    "pairs": (pairs_again, 0.25),
}


def woven(material: DrillMaterial, length: int, events: list[Event], draw: random.Random):
    """Filler with the events at their places; places over 1 are the end. Events that do not fit are left out."""
    room = length - 1
    while (used := sum(len(tokens) for _, tokens, _ in events)) > room:
        events.pop()
    filler = material.window(room - used, draw)
    ids, spans, last = [], [], 0
    for place, tokens, answer in sorted(events, key=lambda event: event[0]):
        here = len(filler) if place >= 1 else max(last, sentence_end(material, filler, round(place * len(filler))))
        ids += filler[last:here]
        last = here
        if answer is not None:
            spans.append((len(ids) + answer[0], len(ids) + sum(answer)))
        ids += tokens
    return [*ids, *filler[last:], material.end], spans


def _pairs(material: DrillMaterial, room: float, most: int, draw: random.Random, *frame: str):
    pairs, texts, size = [], [], 0
    for key in draw.sample(material.keys, min(most, int(room) // 2, len(material.keys))):
        value = draw.choice(material.values)
        text = sentence(material, key, *frame[:1], value, *frame[1:])
        size += len(text)
        if size > room and pairs:
            break
        pairs.append((key, value))
        texts.append(text)
    return pairs, texts


def _after(material: DrillMaterial, length: int, body, gap, tail, spans, draw: random.Random):
    """Filler, `body`, `gap`, `tail` and the end of the text; `spans` count from the start of `tail`."""
    tail = tail[: length - 1 - len(body) - len(gap)]
    head = material.window(length - 1 - len(body) - len(gap) - len(tail), draw)
    begin = len(head) + len(body) + len(gap)
    kept = [(begin + start, begin + stop) for start, stop in spans if stop <= len(tail)]
    return [*head, *body, *gap, *tail, material.end], kept


def row_of(material: DrillMaterial, length: int, draw: random.Random) -> tuple[list[int], list[float]]:
    """A row of packed drills: `length` token ids and the weight of each token as an answer (0: no answer)."""
    ids, weights = [], []
    makers, shares = zip(*DRILLS.values(), strict=True)
    alone = draw.random() < ALONE
    while (rest := length - len(ids)) >= SHORTEST:
        size = length if alone else min(rest, round(SHORTEST * (length / SHORTEST) ** draw.random()))
        size = rest if rest - size < SHORTEST else size
        (make,) = draw.choices(makers, shares)
        tokens, spans = make(material, size, draw)
        assert len(tokens) == size
        marks = [0.0] * size
        weight = min(1.0, ANSWERED / max(1, len(spans)))
        for start, stop in spans:
            marks[start:stop] = [weight] * (stop - start)
        ids += tokens
        weights += marks
    return ids, weights


class Rows(IterableDataset):
    """Batches of `rows` rows of `length` tokens: half of them real text, half drills, in this order.

    An item is (ids [rows, length] int32, weights [rows, length] fp32); weights are 0 in real text. Every worker of a
    loader draws its own batches, from `seed` and its number.
    """

    def __init__(self, material: DrillMaterial, rows: int, length: int, seed: int):
        self.material, self.rows, self.length, self.seed = material, rows, length, seed

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        torch.set_num_threads(1)
        draw = random.Random(f"{self.seed} {self.length} {0 if worker is None else worker.id}")
        while True:
            yield self.batch(draw)

    def batch(self, draw: random.Random) -> tuple[Tensor, Tensor]:
        text = self.rows // 2
        rows = [(self.material.window(self.length, draw), [0.0] * self.length) for _ in range(text)]
        rows += [row_of(self.material, self.length, draw) for _ in range(self.rows - text)]
        ids, weights = zip(*rows, strict=True)
        return torch.tensor(ids, dtype=torch.int32), torch.tensor(weights)
