"""Rows of training in which a person's facts are said in text and asked again later, for students of SmolLM2.

"Fiona has bought the lantern." is said somewhere in text of the corpus. Later in the row the sentence begins again, or
a question asks for it: most often in a list of such questions, in the text or at its end, since the teacher answers
them better there than alone in other text. Each fact of a row has another sentence, another person and another thing,
because the teacher confuses facts that differ in the person alone. What stands around is text of the corpus.

The drills have no sentence, question, name or thing of the probes (`memmix eval`), and their words begin with other
tokens. So probes of students measure recall, not what a drill has taught about a word. The product's own drills
(`training/drills.py`) are those of the bundled transformer: lists and keys that SmolLM2 itself does not answer.
"""

import random
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.drills import DrillMaterial, Event, place_of, woven
from hf_memmix.training.evaluation.probes import Material
from hf_memmix.training.evaluation.probes.material import Sample
from hf_memmix.training.evaluation.probes.tasks import NAMES as KEYS_OF_PROBES
from hf_memmix.training.evaluation.probes.tasks import Form, needle, sentence
from hf_memmix.training.experiments.common.debian_text import END
from hf_memmix.training.experiments.smollm2.drill_words import FORMS, LEADS, NAMES, THINGS

FEWEST, MOST = 8, 24  # facts of a row
TOKENS_OF_A_FACT = 64  # a row has at least so many for each fact
LISTS = 2  # at most so many lists of questions beside the one at the end
IN_WORDS = 0.4  # share of the lists and of the single facts that are asked as questions
ALONE = 0.25  # share of the facts that are also asked alone
TWICE = 0.3  # share of the facts that are asked in two lists, if there are two


class FactMaterial(DrillMaterial):
    """Filler from the training text `tokens` [N], persons and things without those of the probes of `avoid`."""

    def __init__(self, tokenizer, tokens: numpy.ndarray, avoid: Material):
        self.tokenizer, self._words, self._pieces, self.start = tokenizer, {}, {}, []
        self.filler, self.end = tokens, tokenizer.get_vocab().get(END, tokenizer.eos_token_id)
        taken = {ids[0] for pool in (avoid.nouns, avoid.people, avoid.keys[:KEYS_OF_PROBES]) for _, ids in pool}
        self.names = [name for name in self._pool(NAMES) if name[1][0] not in taken]
        taken |= {ids[0] for _, ids in self.names}
        self.values = [thing for thing in self._pool(THINGS) if thing[1][0] not in taken]
        self.keys = self.names


def asked_of(material: Material, form: Form, key, in_words: bool) -> list[int]:
    """The tokens before an answer: the sentence again, or a question and the beginning of the sentence."""
    before, after = form.question.split("{}")
    question = sentence(material, "\nQ: " + before, key, after + "\nA:") if in_words else ()
    return [*question, *form.told(material, key)]


def facts(material: FactMaterial, length: int, draw: random.Random) -> tuple[list[int], list[tuple[int, int]]]:
    """A row of `length` tokens, and where its answers begin and end."""
    count = min(draw.randint(FEWEST, MOST), max(1, length // TOKENS_OF_A_FACT), len(material.names))
    lists = {draw.uniform(0.2, 0.9): draw.random() < IN_WORDS for _ in range(draw.randint(0, LISTS))} | {
        1.0: draw.random() < IN_WORDS
    }
    events: list[Event] = [(place, material.piece(draw.choice(LEADS)), None) for place in lists]
    pools = (FORMS, material.names, material.values)
    for form, key, value in zip(*(draw.sample(pool, count) for pool in pools), strict=True):
        place = min(place_of(draw), place_of(draw))  # early, so that more questions are far
        told = [*form.told(material, key), *sentence(material, value, ".")]
        after = [at for at in lists if at > place]
        asked = [(at, lists[at]) for at in draw.sample(after, min(len(after), 2 if draw.random() < TWICE else 1))]
        if draw.random() < ALONE:
            asked.append((draw.uniform(place, 1), draw.random() < IN_WORDS))
        events.append((place, told, None))
        for at, in_words in asked:
            question = asked_of(material, form, key, in_words)
            answer = (len(question), len(value[1]))
            events.append((at, [*question, *sentence(material, value, ".")], answer))
    return woven(material, length, events, draw)


def probe(material: FactMaterial, text: Material, length: int, depth: float, draw: random.Random) -> Sample:
    """A sample of `fact` with sentences and words of the drills, in the filler of `text`, which no drill has."""
    return needle(text, length, depth, draw, forms=(draw.choice(FORMS),), words=material.values, names=material.names)


@dataclass(frozen=True)
class Drills:
    """How many of the rows are drills, and what their answers weigh.

    share: of the rows, 0 to 1.
    answers: the answers of a drill together weigh this times as much as all tokens of its row, beside the weight that
        they have as tokens. With 0, every token of every row has the same weight.
    """

    share: float
    answers: float = 1.0

    def has(self, row: int) -> bool:
        return int((row + 1) * self.share) > int(row * self.share)

    def blocks(self, tokens: Tensor, block_size: int, material: FactMaterial, seed: int = 0) -> TokenBlocks:
        """The rows of the stream `tokens` [N], some of which are drills in their place; their weights are the loss
        mask [rows, block_size].
        """
        count = len(tokens) // block_size
        rows = tokens[: count * block_size].clone().view(count, block_size)
        weights = torch.ones(count, block_size)
        for row in filter(self.has, range(count)):
            ids, spans = facts(material, block_size, random.Random(f"{seed} {block_size} {row}"))
            rows[row] = torch.tensor(ids)
            # a weight stands where the token is predicted, which is one token before it
            places = [place - 1 for start, stop in spans for place in range(start, stop)]
            weights[row, places] += self.answers * block_size / max(1, len(places))
        return TokenBlocks(rows.flatten(), block_size, loss_mask=weights)
