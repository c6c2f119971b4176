"""The material of probes: filler text, keys and values, as tokens of any tokenizer.

A prompt is built from lists of tokens, not from a string. So its length and the positions of answers are exact.
"""

import functools
import random
import re
from collections import Counter
from dataclasses import dataclass

from hf_memmix.conversion.text_rows import beginning_of, encode
from hf_memmix.errors import UserError
from hf_memmix.training.chat_rows import render
from hf_memmix.training.evaluation.probes.nouns import NAMES, NOUNS
from hf_memmix.training.text_files import Conversation

MAX_WORD_TOKENS = 3
MAX_VALUES = 128
MAX_KEYS = 1024
COMMON = 150  # so many of the most frequent words are not used: a model predicts them without recall
DOCUMENT_MARK = "<|endoftext|>"
MESSAGE = "The message of a user."  # in its place, a chat has the text and the question


@dataclass(frozen=True)
class Answer:
    """Tokens [start, stop) of a sequence, which a model can predict by recall.

    depth: position of the answer in the context, from 0 (start) to 1 (end); None if it is in many places.
    candidates: first tokens of all possible answers, with the right one; empty if every token is possible.
    replaced: whether the control's context has something else in the place of this answer. Without it, a control
        measures nothing.
    asked: where a model that generates begins to answer, at most `start`; None if nothing is asked there.
    """

    start: int
    stop: int
    depth: float | None = None
    candidates: tuple[int, ...] = ()
    replaced: bool = True
    asked: int | None = None


@dataclass(frozen=True)
class Sample:
    """A sequence with answers. In `control`, the context has other words in the place of the answers."""

    ids: list[int]
    control: list[int]
    answers: list[Answer]


class Material:
    """Filler, keys and values of `text`, as tokens. Keys are names first, then other words.

    A word has one to three tokens, occurs more than once, and is not one of the most frequent words. No two keys, and
    no two values, have the same first token.

    Args:
        chat: in probes that are questions, text and question are a message of a user in the tokenizer's chat template,
            and the answer is that of the assistant. `start` and `turn` are what the template puts before and behind
            the message; without a chat, `start` is what the tokenizer puts before a text.

    Raises:
        ValueError: there are fewer than 8 such words for keys or for values, or there is no chat template.
    """

    def __init__(self, tokenizer, text: str, chat: bool = False):
        self.tokenizer, self.chat, self._words, self._pieces = tokenizer, chat, {}, {}
        self.filler = self.encode(text.replace(DOCUMENT_MARK, "\n"))
        self.start, self.turn = self._around_a_message() if chat else (beginning_of(tokenizer), [])
        counts = Counter(re.findall(r"[A-Za-z]+", text))
        order = sorted(counts, key=lambda word: (-counts[word], word))
        if sum(len(word) > 3 for word in order) > 4 * MAX_VALUES:
            order = [word for word in order if len(word) > 3]
        lower = [word for word in order[COMMON:] if word.islower() and counts[word] > 1]
        names = [w for w in order if w.istitle() and counts[w] > 1 and counts[w.lower()] < counts[w] / 4]
        if len(lower) < 2 * MAX_VALUES:
            lower = [word for word in order if word.islower()]
        pool = self._pool(lower)
        values = min(MAX_VALUES, len(pool) // 2)
        self.values = pool[:values]
        self.keys = self._pool(names + [word for word in lower if word not in {w for w, _ in self.values}])[:MAX_KEYS]
        taken = {tokens[0] for _, tokens in self.values}
        self.keys = [(word, tokens) for word, tokens in self.keys if tokens[0] not in taken]
        if min(len(self.keys), len(self.values)) < 8:
            raise UserError(
                f"the text gives {len(self.keys)} keys and {len(self.values)} values that this tokenizer writes in at "
                f"most {MAX_WORD_TOKENS} tokens; probes need 8 of each: give a longer text in the tokenizer's language"
            )

    def _around_a_message(self) -> tuple[list[int], list[int]]:
        asked = Conversation([{"role": "user", "content": MESSAGE}], None, "a probe that is asked as a chat")
        before, _, after = render(asked, self.tokenizer, prompt=True).partition(MESSAGE)
        return self.encode(before), self.encode(after)

    @functools.cached_property
    def people(self) -> list[tuple[str, tuple[int, ...]]]:
        """The names of `nouns.NAMES` as keys; the first keys of the text where the tokenizer writes less than half of
        them in at most three tokens.
        """
        taken = {tokens[0] for _, tokens in self.nouns}
        pool = [name for name in self._pool(NAMES) if name[1][0] not in taken]
        return pool if len(pool) >= len(NAMES) // 2 else self.keys[: len(NAMES)]

    @functools.cached_property
    def nouns(self) -> list[tuple[str, tuple[int, ...]]]:
        """The words of `nouns.NOUNS` as values; those of the text where the tokenizer writes less than half of them in
        at most three tokens, as one for another language.
        """
        taken = {tokens[0] for _, tokens in self.keys}
        pool = [noun for noun in self._pool(NOUNS) if noun[1][0] not in taken]
        return pool if len(pool) >= len(NOUNS) // 2 else self.values

    @functools.cached_property
    def pair_counts(self) -> Counter:
        """How often each pair of neighbouring tokens occurs in the filler."""
        return Counter(zip(self.filler[:-1], self.filler[1:], strict=True))

    def is_word(self, token: int) -> bool:
        """Whether a token has at least three letters and nothing else."""
        if token not in self._words:
            text = self.tokenizer.decode([token]).strip()
            self._words[token] = len(text) > 2 and text.isalpha()
        return self._words[token]

    def encode(self, text: str) -> list[int]:
        return encode(text, self.tokenizer)

    def piece(self, text: str) -> list[int]:
        """The tokens of `text` inside a longer text. At the start of a text, some tokenizers add a space."""
        if text not in self._pieces:
            head, whole = self.encode("a"), self.encode("a" + text)
            self._pieces[text] = whole[len(head) :] if whole[: len(head)] == head else self.encode(text)
        return self._pieces[text]

    def window(self, length: int, draw: random.Random) -> list[int]:
        """`length` tokens of filler from a random place. A text that is too short is repeated."""
        start = draw.randrange(max(1, len(self.filler) - length))
        tokens = self.filler[start : start + length]
        while len(tokens) < length:
            tokens += self.filler[: length - len(tokens)]
        return tokens

    def _pool(self, words: list[str]) -> list[tuple[str, tuple[int, ...]]]:
        unknown, first, pool = self.tokenizer.unk_token_id, set(), []
        for word in words:
            tokens = tuple(self.piece(" " + word))
            if 0 < len(tokens) <= MAX_WORD_TOKENS and tokens[0] not in first and unknown not in tokens:
                first.add(tokens[0])
                pool.append((word, tokens))
        return pool
