"""Rows of training in which facts about persons are said in text and asked for again later.

"Fiona has bought the lantern." is said somewhere in text of the corpus. Later in the row the sentence begins again, or
a question asks for it: most often in a list of such questions, in the text or at its end, since the teacher answers
them better there than alone in other text. Each fact of a row has another sentence, another person and another thing,
because a small teacher confuses facts that differ in the person alone. What stands around is training text.

The drills have no sentence, question, name or thing of the probes of `memmix eval`, and their words begin with other
tokens. So probes of students measure recall, not what a drill has taught about a word. What they change is measured in
`training/experiments/smollm2/README.md`. The drills of `drills.py` are those of the bundled transformer: lists and
keys, to which a pretrained model itself does not know the answers.
"""

import dataclasses
import random

import numpy
import torch

from hf_memmix.conversion.text_rows import beginning_of
from hf_memmix.errors import UserError
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.drills import DrillMaterial, Event, place_of, woven
from hf_memmix.training.evaluation.probes import Material
from hf_memmix.training.evaluation.probes.material import DOCUMENT_MARK, MAX_WORD_TOKENS
from hf_memmix.training.evaluation.probes.nouns import NAMES as NAMES_OF_PROBES
from hf_memmix.training.evaluation.probes.nouns import NOUNS
from hf_memmix.training.evaluation.probes.tasks import NAMES as KEYS_OF_PROBES
from hf_memmix.training.evaluation.probes.tasks import Form, sentence
from hf_memmix.training.fact_words import FORMS, LEADS, NAMES, THINGS

SHORTEST_ROW = 128  # tokens
FEWEST, MOST = 8, 24  # facts of a row
TOKENS_OF_A_FACT = 64  # a row has at least so many for each fact
LISTS = 2  # at most so many lists of questions beside the one at the end
IN_WORDS = 0.4  # share of the lists and of the single facts that are asked as questions
ALONE = 0.25  # share of the facts that are also asked alone
TWICE = 0.3  # share of the facts that are asked in two lists, if there are two


class FactMaterial(DrillMaterial):
    """Filler from the training text `tokens` [N], persons and things without those of the probes.

    avoid: the material of probes about a text, whose keys the drills do not have, either.
    forms: sentences and their questions.

    Raises:
        ValueError: the tokenizer writes too few of the words in at most three tokens.
    """

    def __init__(
        self, tokenizer, tokens: numpy.ndarray, avoid: Material | None = None, forms: tuple[Form, ...] = FORMS
    ):
        self.forms = forms
        # the last token of a row, which predicts nothing
        end = tokenizer.get_vocab().get(DOCUMENT_MARK, tokenizer.eos_token_id)
        self.begin(tokenizer, tokens, int(tokens[-1]) if end is None else end)
        if avoid is None:
            pools = (self._pool(NOUNS), self._pool(NAMES_OF_PROBES))
        else:
            pools = (avoid.nouns, avoid.people, avoid.keys[:KEYS_OF_PROBES])
        taken = {ids[0] for pool in pools for _, ids in pool}
        self.names = [name for name in self._pool(NAMES) if name[1][0] not in taken]
        taken |= {ids[0] for _, ids in self.names}
        self.values = [thing for thing in self._pool(THINGS) if thing[1][0] not in taken]
        self.keys = self.names
        if (found := min(len(self.names), len(self.values))) < MOST:
            raise UserError(
                f"this tokenizer writes {found} names or things of the drills, which are English, in at most"
                f" {MAX_WORD_TOKENS} tokens, and a row needs {MOST}; set drills to 0"
            )


def told_of(material: Material, form: Form, key, value) -> tuple[int, ...]:
    """The tokens of a sentence before its value; "a" is "an" before a vowel."""
    if form.said.endswith(" a") and value[0][0] in "aeiou":
        form = dataclasses.replace(form, said=form.said + "n")
    return form.told(material, key)


def asked_of(material: Material, form: Form, key, value, in_words: bool) -> list[int]:
    """The tokens before an answer: the sentence again, or a question and the beginning of the sentence."""
    before, after = form.question.split("{}")
    question = sentence(material, "\nQ: " + before, key, after + "\nA:") if in_words else ()
    return [*question, *told_of(material, form, key, value)]


def facts(material: FactMaterial, length: int, draw: random.Random) -> tuple[list[int], list[tuple[int, int]]]:
    """A row of `length` tokens, and where its answers begin and end."""
    count = min(draw.randint(FEWEST, MOST), max(1, length // TOKENS_OF_A_FACT), len(material.names))
    lists = {draw.uniform(0.2, 0.9): draw.random() < IN_WORDS for _ in range(draw.randint(0, LISTS))} | {
        1.0: draw.random() < IN_WORDS
    }
    events: list[Event] = [(place, material.piece(draw.choice(LEADS)), None) for place in lists]
    pools = (material.forms, material.names, material.values)
    for form, key, value in zip(*(draw.sample(pool, count) for pool in pools), strict=True):
        place = min(place_of(draw), place_of(draw))  # early, so that more questions are far
        told = [*told_of(material, form, key, value), *sentence(material, value, ".")]
        after = [at for at in lists if at > place]
        asked = [(at, lists[at]) for at in draw.sample(after, min(len(after), 2 if draw.random() < TWICE else 1))]
        if draw.random() < ALONE:
            asked.append((draw.uniform(place, 1), draw.random() < IN_WORDS))
        events.append((place, told, None))
        for at, in_words in asked:
            question = asked_of(material, form, key, value, in_words)
            answer = (len(question), len(value[1]))
            events.append((at, [*question, *sentence(material, value, ".")], answer))
    return woven(material, length, events, draw)


def with_drills(
    data: TokenBlocks,
    tokenizer,
    share: float,
    bos: str = "rows",
    answers: float = 1.0,
    material: FactMaterial | None = None,
) -> TokenBlocks:
    """The rows, some of which are drills in their place. The drills are the same in every run.

    Args:
        share: of the rows that are drills, above 0 and at most 1.
        bos: as the rows were made: with "rows", a drill begins as the tokenizer begins a text, too.
        answers: the answers of a drill together weigh this times as much as all tokens of its row, beside the weight
            that they have as tokens.
        material: words and filler; None: those of the rows and of the tokenizer.

    Returns:
        Rows whose `loss_mask` [rows, block_size] has the weights.

    Raises:
        ValueError: the share is not between 0 and 1, or makes no row a drill; the rows have drills, count answers
            alone or are too short; or the tokenizer writes too few words of the drills.
    """
    size, count = data.block_size, len(data)
    if not 0 < share <= 1:
        raise UserError(f"the share of drills is {share:g}; it must be above 0 and at most 1")
    if data.drills:
        raise UserError(f"{data.drills:g} of the rows are drills already; give the rows without drills")
    chosen = [row for row in range(count) if int((row + 1) * share) > int(row * share)]
    if not chosen:
        raise UserError(
            f"drills are {share:g} of the rows, and the data are {count} rows, so none is a drill; give more text or a"
            " larger share"
        )
    if data.loss != "all":
        raise UserError(f"drills are {share:g}, but the data count answers alone; set drills to 0, or loss to all")
    if size < SHORTEST_ROW:
        raise UserError(f"drills need rows of at least {SHORTEST_ROW} tokens, and these have {size}; give larger ones")
    start = beginning_of(tokenizer) if bos == "rows" else []
    if material is None:
        material = FactMaterial(tokenizer, data.blocks[:, len(start) :].flatten().numpy())
    rows, weights = data.blocks.clone(), torch.ones(count, size)
    positions = None if data.positions is None else data.positions.clone()
    for row in chosen:
        ids, spans = facts(material, size - len(start), random.Random(f"0 {size} {row}"))
        rows[row] = torch.tensor(start + ids)
        # a weight stands where the token is predicted, which is one token before it
        places = [len(start) + place - 1 for begin, stop in spans for place in range(begin, stop)]
        weights[row, places] += answers * size / max(1, len(places))
        if positions is not None:
            positions[row] = torch.arange(size)
    return TokenBlocks(rows.flatten(), size, positions, data.tokenizer, weights, drills=share)


def of_recipe(data, tokenizer, recipe):
    """The rows of a run, with the drills that its recipe asks for."""
    return with_drills(data, tokenizer, recipe.drills, recipe.bos) if recipe.drills else data
