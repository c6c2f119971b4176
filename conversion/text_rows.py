"""Cuts texts into rows of tokens that begin as the tokenizer begins a text, e.g. with BOS.

Many models were trained only on texts that begin with BOS, and predict badly without it. So by default every row
begins so, also a row that is cut in the middle of a document: a model that generates always has BOS in its context.
"""

from collections.abc import Iterable, Iterator

from hf_memmix.errors import UserError


def beginning_of(tokenizer) -> list[int]:
    """The tokens that the tokenizer puts before a text; [] for many tokenizers, and for None."""
    if tokenizer is None:
        return []
    plain, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []


def end_tokens(generation_config, tokenizer) -> set[int]:
    """The tokens that end a generated text, of the generation config and of the tokenizer; there may be none."""
    ends = generation_config.eos_token_id
    return {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}


def encode(text: str, tokenizer) -> list[int]:
    """The tokens of a text alone, without those that the tokenizer puts before or after it."""
    # verbose=False: the warning about long texts does not apply, because the tokens are cut into rows
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def cut_rows(parts: Iterable[list[int]], length: int, beginning: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """As `cut_marked_rows`, without marks: yields the tokens of each row and their positions."""
    for tokens, positions, _ in cut_marked_rows(((part, part) for part in parts), length, beginning):
        yield tokens, positions


def cut_marked_rows(
    parts: Iterable[tuple[list[int], list]], length: int, beginning: list[int]
) -> Iterator[tuple[list[int], list[int], list]]:
    """Joins `parts` and cuts them into rows. Tokens that fill no row come last, in a shorter row.

    Args:
        parts: for each document its tokens, which begin as the tokenizer begins a text, and a mark of each token.
        length: tokens per row.
        beginning: what is put before a row that does not begin so: it is cut in the middle of a part. These tokens
            have the mark 0.

    Yields:
        tokens of a row; their positions, which start at 0 with every part, and with the rest of a part that continues
        in the next row; and their marks.

    Raises:
        ValueError: a row has no room for text behind `beginning`.
    """
    if length <= len(beginning):
        raise UserError(
            f"rows of {length} tokens have no room behind the {len(beginning)} tokens that begin a text;"
            " give a larger block_size"
        )
    tokens, positions, marks = [], [], []
    for part, marks_of_part in parts:
        at = 0
        while at < len(part):
            begins = bool(tokens) or part[at : at + len(beginning)] == beginning
            head = [] if begins else beginning
            end = at + length - len(tokens) - len(head)
            piece = head + part[at:end]
            marks += [0] * len(head) + marks_of_part[at:end]
            at += len(piece) - len(head)
            tokens += piece
            positions += range(len(piece))
            if len(tokens) == length:
                yield tokens, positions, marks
                tokens, positions, marks = [], [], []
    if tokens:
        yield tokens, positions, marks
