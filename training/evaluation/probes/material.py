"""What probes are made of: filler, keys and values of a text, as tokens of whatever tokenizer.

A prompt is put together from token pieces, not from a string, so that every sequence has the asked length to the token
and positions of answers are exact.
"""

import functools
import random
import re
from collections import Counter
from dataclasses import dataclass

MAX_WORD_TOKENS = 3
MAX_VALUES = 128
MAX_KEYS = 1024
COMMON = 150  # the most frequent words stay out of the pools: every model expects them everywhere
DOCUMENT_MARK = "<|endoftext|>"


@dataclass(frozen=True)
class Answer:
    """Tokens [start, stop) of a sequence that a model with recall predicts.

    depth: where in the sequence's context the answer stands, 0 the beginning and 1 the end, None if everywhere.
    candidates: first tokens of the words that may be the answer, this one among them; empty if that is any token.
    """

    start: int
    stop: int
    depth: float | None = None
    candidates: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A sequence with its answers, and `control`: the same with other words where the context says the answers."""

    ids: list[int]
    control: list[int]
    answers: list[Answer]


class Material:
    """Filler, keys and values of `text` as tokens; keys are names as far as the text has them.

    Words are those of one to three tokens, no two of a pool with the same first token, neither very frequent nor
    met once.

    Raises:
        ValueError: fewer than 8 such words for keys or for values.
    """

    def __init__(self, tokenizer, text: str):
        self.tokenizer, self._words, self._pieces = tokenizer, {}, {}
        self.filler = self.encode(text.replace(DOCUMENT_MARK, "\n"))
        plain, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
        self.start = whole[: len(whole) - len(plain)] if whole[-len(plain) :] == plain else []
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
            raise ValueError(
                f"the text gives {len(self.keys)} keys and {len(self.values)} values that this tokenizer writes in at "
                f"most {MAX_WORD_TOKENS} tokens; probes need 8 of each: give a longer text in the tokenizer's language"
            )

    @functools.cached_property
    def pair_counts(self) -> Counter:
        """How often each pair of neighbouring tokens stands in the filler."""
        return Counter(zip(self.filler[:-1], self.filler[1:], strict=True))

    def is_word(self, token: int) -> bool:
        """Whether a token is three letters or more of a word rather than a mark or a suffix."""
        if token not in self._words:
            text = self.tokenizer.decode([token]).strip()
            self._words[token] = len(text) > 2 and text.isalpha()
        return self._words[token]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def piece(self, text: str) -> list[int]:
        """The tokens of `text` in the middle of a text: some tokenizers put a space before the first word."""
        if text not in self._pieces:
            head, whole = self.encode("a"), self.encode("a" + text)
            self._pieces[text] = whole[len(head) :] if whole[: len(head)] == head else self.encode(text)
        return self._pieces[text]

    def window(self, length: int, draw: random.Random) -> list[int]:
        """`length` tokens of filler from a random place; the text starts again where it is too short."""
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
