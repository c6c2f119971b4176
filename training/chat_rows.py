"""Turns conversations into tokens by the chat template of a tokenizer, and finds the tokens of the answers.

A template with the marks `{% generation %}` says itself which tokens are an answer. Without them, the answer of
message i is what the template adds to the messages before it, which end as a prompt for the assistant; the text up to
i must then be the beginning of the whole text. Some templates change earlier turns (they remove thoughts): those are
refused.
"""

import re

from jinja2 import TemplateError

from hf_memmix.conversion.text_rows import encode
from hf_memmix.errors import UserError
from hf_memmix.training.text_files import Conversation

_MARK = re.compile(r"{%-?\s*generation\s*-?%}")


def chat_template(tokenizer, why: str) -> str:
    """Return the chat template of a tokenizer.

    Raises:
        ValueError: the tokenizer has no template; the message begins with `why`, the reason for needing one.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{why}, but the tokenizer has no chat template; use the tokenizer of an instruct model, or save a"
            " template as chat_template.jinja beside it"
        )
    return tokenizer.get_chat_template()


def render(conversation: Conversation, tokenizer, count: int | None = None, prompt: bool = False, **options):
    """The first `count` messages of a conversation (default: all) as the template writes them.

    `prompt`: followed by what begins an answer. `options` of `apply_chat_template` may ask for tokens.
    """
    messages = conversation.messages[:count]
    options = {"tokenize": False, "tools": conversation.tools, "add_generation_prompt": prompt} | options
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except (TemplateError, TypeError, KeyError) as error:
        raise UserError(f"{conversation.place} does not fit the chat template: {error}") from None


def chat_tokens(conversation: Conversation, tokenizer) -> list[int]:
    """The tokens of a whole conversation."""
    chat_template(tokenizer, f"{conversation.place} holds messages")
    return encode(render(conversation, tokenizer), tokenizer)


def answer_tokens(conversation: Conversation, tokenizer) -> tuple[list[int], list[bool]]:
    """The tokens of a whole conversation, and which of them belong to answers of the assistant, with their ends.

    Raises:
        ValueError: it has no answer, or the template does not tell which tokens are answers.
    """
    template = chat_template(tokenizer, f"{conversation.place} holds messages")
    if not any(message["role"] == "assistant" for message in conversation.messages):
        raise UserError(f"{conversation.place} has no answer of the assistant, so no token of it counts; remove it")
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} cannot tell where its tokens stand in a text; count all tokens")
    if _MARK.search(template):
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        marked = render(conversation, tokenizer, **options)
        return list(marked["input_ids"]), [bool(mark) for mark in marked["assistant_masks"]]
    whole = render(conversation, tokenizer)
    spans = _answer_spans(conversation, tokenizer, whole)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    places = encoded["offset_mapping"]
    inside = [any(first < end and last > start for start, end in spans) for first, last in places]
    return encoded["input_ids"], inside


def _answer_spans(conversation: Conversation, tokenizer, whole: str) -> list[tuple[int, int]]:
    """Where the answers stand in the text of a conversation: [start, end)."""
    spans = []
    for index, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        before = render(conversation, tokenizer, index, prompt=True)
        through = render(conversation, tokenizer, index + 1)
        if not (through.startswith(before) and whole.startswith(through)):
            raise UserError(
                f"{conversation.place}: the chat template changes earlier turns, so it does not tell which tokens are"
                f" message {index + 1}; put {{% generation %}} and {{% endgeneration %}} around the answer in the"
                " template, or count all tokens (--loss all)"
            )
        spans.append((len(before), len(_without_rest(through, tokenizer))))
    return spans


def _without_rest(text: str, tokenizer) -> str:
    """The text without white space behind the token that ends a turn: a model stops at this token."""
    special = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    short = text.rstrip()
    return short if short.endswith(special) else text


def ends_a_turn(tokenizer) -> bool:
    """Whether the chat template ends an answer by the end-of-sequence token, which then does not end a document."""
    if tokenizer.chat_template is None or tokenizer.eos_token is None:
        return False
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        text = render(Conversation(turns, None, "a conversation of two turns"), tokenizer)
    except UserError:
        return False  # a template for other roles
    return tokenizer.eos_token in text[text.rfind("b") :]
