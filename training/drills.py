"""Training sequences of recall, in the formats of the probes, with other keys and values than the probes have.

A drill holds statements and questions in filler text. It has more questions than a probe, so that a token of training
has more answers: passwords and lines of a dictionary, pairs of keys and values (MQAR), chains of variables of up to
two hops, and pieces of text that come again. Rows of training are packed: each drill ends with the end-of-text token.

No key or value of a drill begins with the first token of a word that is to be avoided, e.g. of a probe's key or value,
with one exception: keys and values of MQAR may also be single tokens of the vocabulary, of which only the first tokens
of the unseen words are left out, by default every fourth word to be avoided (`unseen_of`). Pieces have at least three
tokens, and any token may stand in them. So every token is copied somewhere, and no word can be told to be "never an
answer"; but the unseen words are in no drill of pairs.
"""

import copy
import random
import re
from collections import Counter
from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from hf_memmix.errors import UserError
from hf_memmix.training.evaluation.probes import Material
from hf_memmix.training.evaluation.probes.material import MAX_WORD_TOKENS
from hf_memmix.training.evaluation.probes.tasks import (
    CHAIN,
    HOPS,
    PAIR_LINE,
    PASSWORD,
    has_the_same,
    has_value,
    sentence,
    sentence_end,
)

SHORTEST = 96  # tokens of a drill
AT_THE_START = 0.1  # share of the first statements that stand at the start of their drill
ALONE = 0.25  # share of the rows that are one long drill
ANSWERED = 8  # a drill with more answers than this has the weight of so many
WORD_TEXT = 700_000  # tokens of the training text from which keys and values are taken
KINDS = {"words": 0.4, "tokens": 0.35, "spans": 0.25}  # of the keys and of the values of MQAR
FEW_VALUES = (32, 128, 1024)  # the values of one drill of MQAR begin with so many tokens
SHUFFLED = 0.6  # share of the drills with shuffled text, and of those with the pieces in another order
PIECES = (4, 8, 16)  # tokens of the longest piece
SHORTEST_PIECE = 3  # tokens, so that pieces are no pairs
FEWEST_WORDS = 18  # in a drill of chains
PART = 4  # one of so many words of the probes is unseen
Word = tuple[str, tuple[int, ...]]
# an event of a drill: its place from 0 to 1, its tokens, and the number of tokens before and of an answer in it
Event = tuple[float, list[int], tuple[int, int] | None]


def first_tokens(material: Material) -> set[int]:
    """The first tokens of all keys and values of a material."""
    return {tokens[0] for pool in (material.keys, material.values) for _, tokens in pool}


def unseen_of(material: Material) -> Material:
    """The material with every fourth of its keys and values."""
    other = copy.copy(material)
    other.keys, other.values = material.keys[::PART], material.values[::PART]
    return other


class DrillMaterial(Material):
    """Filler, keys and values of the training text `tokens` [N], without the words of the probes of `avoid`.

    The words of `unseen` are in no drill but those of pieces; the other ones may be single tokens of MQAR. By default
    they are those of `unseen_of(avoid)`.
    """

    def __init__(self, tokenizer, tokens: numpy.ndarray, avoid: Material, unseen: Material | None = None):
        self.begin(tokenizer, tokens, tokenizer.eos_token_id)
        text = tokenizer.decode(tokens[:WORD_TEXT].tolist())
        counts = Counter(re.findall(r"[A-Za-z]{3,}", text))
        words = [word for word, count in counts.items() if count > 1 and (word.istitle() or word.islower())]
        encoded = tokenizer([" " + word for word in words], add_special_tokens=False)["input_ids"]
        taken = first_tokens(avoid)
        unseen = unseen_of(avoid) if unseen is None else unseen
        shut = first_tokens(unseen) | set(tokenizer.all_special_ids)
        self.tokens = [token for token in range(len(tokenizer)) if token not in shut]
        pool = [(w, tuple(ids)) for w, ids in zip(words, encoded, strict=True) if len(ids) <= MAX_WORD_TOKENS]
        self.keys = [word for word in pool if word[1][0] not in taken]
        self.names = [word for word in self.keys if word[0].istitle()]
        self.values = [word for word in self.keys if word[0].islower()]

    def begin(self, tokenizer, tokens: numpy.ndarray, end: int) -> None:
        """As `Material` begins, but the tokens are known, and there may be any number of keys and values."""
        self.tokenizer, self._words, self._pieces, self.start = tokenizer, {}, {}, []
        self.filler, self.end = tokens, end

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
        start = [*PASSWORD.told(material, key)]
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
            question = [*CHAIN.told(material, chain[asked])]
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
    pairs, texts = _pairs(material, draw.uniform(0.25, 1.0) * length / 2 - 8, length, draw, any_tokens=True)
    tail, spans = [], []
    for i in draw.sample(range(len(pairs)), len(pairs)):
        tail += texts[i]
        spans.append((len(tail) - len(pairs[i][1][1]), len(tail)))
    return _after(material, length, *_body_and_gap(material, length, texts, tail, draw), tail, spans, draw)


def pieces_again(material: DrillMaterial, length: int, draw: random.Random) -> tuple[list[int], list[tuple[int, int]]]:
    """Text or shuffled text, filler of any length, and pieces of the same text in another order or in the same one.

    The answers are the tokens of a piece whose last token before them stands once in the text, so they are known.
    """
    size = int(draw.uniform(0.15, 1.0) * length / 2) - 8
    text = [token for token in material.window(size, draw) if token != material.end]
    if draw.random() < SHUFFLED:
        draw.shuffle(text)
    pieces, longest = [], draw.choice(PIECES)
    while text:
        cut = draw.randint(SHORTEST_PIECE, longest)
        pieces.append(text[:cut])
        text = text[cut:]
    counts = Counter(token for piece in pieces for token in piece)
    tail, spans = [], []
    for piece in draw.sample(pieces, len(pieces)) if draw.random() < SHUFFLED else pieces:
        for i, last in enumerate(piece[:-1], 1):
            if counts[last] == 1:
                spans.append((len(tail) + i, len(tail) + i + 1))
        tail += piece
    return _after(material, length, *_body_and_gap(material, length, pieces, tail, draw), tail, spans, draw)


DRILLS: dict[str, tuple[Callable, float]] = {  # with their shares of the tokens
    "passwords": (passwords, 0.15),
    "chains": (chains, 0.3),
    "lines": (lines, 0.1),
    "pairs": (pairs_again, 0.25),
    "pieces": (pieces_again, 0.2),
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


def _body_and_gap(material: DrillMaterial, length: int, texts, tail, draw: random.Random):
    """The joined texts, and filler that follows them: none, all that fits, or any length."""
    body = [t for text in texts for t in text]
    rest = length - 1 - len(body) - len(tail)
    return body, material.window(draw.choice((0, rest, draw.randint(0, rest))), draw)


def _drawers(material: DrillMaterial, count: int, draw: random.Random) -> tuple[list, Callable]:
    """`count` keys and a function that draws a value: each kind is words, single tokens, or one to three tokens."""
    longest = {"tokens": 1, "spans": MAX_WORD_TOKENS}

    def span(kind: str, first: int) -> Word:
        return "", (first, *draw.choices(material.tokens, k=draw.randrange(longest[kind])))

    kinds = draw.choices(tuple(KINDS), tuple(KINDS.values()), k=2)
    if kinds[0] == "words":
        keys = draw.sample(material.keys, min(count, len(material.keys)))
    else:
        keys = [span(kinds[0], first) for first in draw.sample(material.tokens, min(count, len(material.tokens)))]
    if kinds[1] == "words":
        return keys, lambda: draw.choice(material.values)
    few = draw.sample(material.tokens, min(len(material.tokens), draw.choice(FEW_VALUES)))
    return keys, lambda: span(kinds[1], draw.choice(few))


def _pairs(
    material: DrillMaterial, room: float, most: int, draw: random.Random, *frame: str, any_tokens: bool = False
):
    pairs, texts, size, count = [], [], 0, min(most, int(room) // 2)
    if any_tokens:
        keys, value_of = _drawers(material, count, draw)
    else:
        keys, value_of = draw.sample(material.keys, min(count, len(material.keys))), None
    for key in keys:
        value = draw.choice(material.values) if value_of is None else value_of()
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


def drills_of(material: DrillMaterial, length: int, draw: random.Random) -> tuple[Tensor, Tensor]:
    """A row of drills: token ids [length] int64, and the weights of its answers [length] float32."""
    ids, weights = row_of(material, length, draw)
    ids += material.window(length - len(ids), draw)  # a rest that is too short for a drill is text
    weights += [0.0] * (length - len(weights))
    return torch.tensor(ids), torch.tensor(weights)


def drill_rows(material: DrillMaterial, count: int, length: int, seed: int) -> Tensor:
    """`count` rows of drills [count, length] int64."""
    draw = random.Random(seed)
    return torch.stack([drills_of(material, length, draw)[0] for _ in range(count)])


def material_of(tokenizer, ids: Tensor, probes: str) -> DrillMaterial:
    """Words and filler of the stream `ids` [N], without the unseen words of the probes about the text `probes`.

    Raises:
        ValueError: the stream has too few words for drills.
    """
    unseen = unseen_of(Material(tokenizer, probes))
    material = DrillMaterial(tokenizer, ids.numpy().astype(numpy.int64), unseen, unseen)
    fewest = min(len(material.names), len(material.values))
    if fewest < FEWEST_WORDS:
        raise UserError(
            f"drills need {FEWEST_WORDS} names and as many other words, and the text has {fewest}; give a longer text"
        )
    return material
