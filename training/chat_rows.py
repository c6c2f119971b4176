"""Turns conversations into tokens by the chat template of a tokenizer, and finds the tokens of the answers.

A template with the marks `{% generation %}` says itself which tokens are an answer. Without them, the answer of
message i is what the template adds to the messages before it, which end as a prompt for the assistant; the text up to
i must then be the beginning of the whole text. Some templates change earlier turns (they remove thoughts): those are
refused.

Some templates write the date of today. In training data it is always `DATE`, so that the same files give the same
tokens on every day, and an interrupted run continues.
"""

import re
from contextlib import suppress
from datetime import date

from jinja2 import TemplateError

from hf_memmix.conversion.text_rows import encode
from hf_memmix.errors import UserError
from hf_memmix.training.text_files import Conversation

DATE = date(2024, 7, 26)  # what Llama 3.2's template writes where it cannot ask for the date
_READS_DATE = "strftime_now"
_MARK = re.compile(r"{%-?\s*generation\s*-?%}")


def chat_template(tokenizer, why: str, tools: list | None = None) -> str:
    """Return the chat template of a tokenizer; of several, the one that it uses for a conversation with these tools.

    Raises:
        ValueError: the tokenizer has no template; the message begins with `why`, the reason for needing one.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{why}, but the tokenizer has no chat template; use the tokenizer of an instruct model, or save a"
            " template as chat_template.jinja beside it"
        )
    try:
        return tokenizer.get_chat_template(tools=tools)
    except ValueError as error:  # several templates, of which none is the default
        raise UserError(f"{why}, but the tokenizer has no chat template for them: {error}") from None


def training_date(tokenizer) -> date | None:
    """The date in the training data of this tokenizer; None if its chat template does not write the date."""
    return DATE if _READS_DATE in str(tokenizer.chat_template) else None


def render(
    conversation: Conversation, tokenizer, count: int | None = None, prompt: bool = False, today=False, **options
):
    """The first `count` messages of a conversation (default: all) as the template writes them.

    `prompt`: followed by what begins an answer. `today`: with the date of today, as a chat needs it, not with `DATE`.
    `options` of `apply_chat_template` may ask for tokens.
    """
    messages = conversation.messages[:count]
    template = chat_template(tokenizer, f"{conversation.place} holds messages", conversation.tools)
    if _READS_DATE in template and not today:
        template = _dated(template)
    options = {"tokenize": False, "tools": conversation.tools, "add_generation_prompt": prompt} | options
    try:
        # no message is given as a batch of one, because the library refuses an empty conversation
        text = tokenizer.apply_chat_template(messages or [messages], chat_template=template, **options)
    except (TemplateError, TypeError, KeyError) as error:
        raise UserError(f"{conversation.place} does not fit the chat template: {error}") from None
    if not messages:
        return text[0]
    asked = [str(message.get("content") or "").strip() for message in messages if message["role"] == "user"]
    if asked and isinstance(text, str) and not any(content in text for content in asked):
        without = [message | {"content": ""} if message["role"] == "user" else message for message in messages]
        with suppress(TemplateError, TypeError, KeyError):  # then it reads what the user says
            if tokenizer.apply_chat_template(without, chat_template=template, **options) == text:
                raise UserError(
                    f"{conversation.place}: the chat template does not write what the user says, as templates for"
                    " lists of text and images do; use a template for texts"
                )
    return text


def _dated(template: str) -> str:
    """The template with a macro in place of the library's function, which formats `DATE` instead of the present.

    The library gives functions to no template, so the macro replaces the directives by their values one by one.
    """
    directives = [f"%{flag}{letter}" for flag in ("", "-") for letter in "aAbBcdHIjmMpSUwWxXyYfzZ"]
    directives.append("%%")
    values = "".join(f".replace({name!r}, {DATE.strftime(name)!r})" for name in directives)
    # the line break behind the macro is not written (`trim_blocks`), so the template begins as before
    return f"{{% macro {_READS_DATE}(format) %}}{{{{ format{values} }}}}{{% endmacro %}}\n{template}"


def chat_tokens(conversation: Conversation, tokenizer) -> list[int]:
    """The tokens of a whole conversation."""
    return encode(render(conversation, tokenizer), tokenizer)


def answer_tokens(conversation: Conversation, tokenizer) -> tuple[list[int], list[bool]]:
    """The tokens of a whole conversation, and which of them belong to answers of the assistant, with their ends.

    Raises:
        ValueError: it has no answer, or the template does not tell which tokens are answers.
    """
    template = chat_template(tokenizer, f"{conversation.place} holds messages", conversation.tools)
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
        through = render(conversation, tokenizer, index + 1)
        before = render(conversation, tokenizer, index, prompt=True) if index else _before_first(through, tokenizer)
        if not (through.startswith(before) and whole.startswith(through)):
            raise UserError(
                f"{conversation.place}: the chat template changes earlier turns, so it does not tell which tokens are"
                f" message {index + 1}; put {{% generation %}} and {{% endgeneration %}} around the answer in the"
                " template, or count all tokens (--loss all)"
            )
        spans.append((len(before), len(_without_rest(through, tokenizer))))
    return spans


def _before_first(text: str, tokenizer) -> str:
    """The beginning of a conversation up to its first answer, which no message of a user precedes.

    A template may write more before the first message than it writes for no message, e.g. a system prompt. So the
    answer begins behind what the template adds to a question as the prompt for its answer.
    """
    question = Conversation([{"role": "user", "content": "a"}], None, "a conversation that begins with an answer")
    asked, prompted = (render(question, tokenizer, prompt=prompt) for prompt in (False, True))
    begins = prompted.removeprefix(asked)
    return "".join(text.partition(begins)[:2]) if begins in text else begins


def _without_rest(text: str, tokenizer) -> str:
    """The text without white space behind the token that ends a turn: a model stops at this token."""
    special = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    short = text.rstrip()
    return short if short.endswith(special) else text


def ends_a_turn(tokenizer) -> bool:
    """Whether the chat template ends an answer by the end-of-sequence token, which then does not end a document."""
    if tokenizer.chat_template is None or tokenizer.eos_token is None:
        return False
    answer = "an answer that no token contains"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    try:
        text = render(Conversation(turns, None, "a conversation of two turns"), tokenizer)
    except UserError:
        return False  # a template for other roles
    return tokenizer.eos_token in text.rpartition(answer)[2]
