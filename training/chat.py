"""A conversation with a model: each turn reads only its own new tokens.

The cache of a turn holds all earlier ones. The template writes the whole conversation again for the next turn; if that
text begins with the text that the cache has read, only the rest is tokenised and read. A template that changes earlier
turns (it trims them, or removes thoughts) gives another beginning: then the conversation is read again as it wrote it.
"""

from dataclasses import dataclass, field

from transformers import TextStreamer

from hf_memmix._generation_hooks import CACHE
from hf_memmix.conversion.limits import check_length, check_tokens
from hf_memmix.conversion.text_rows import encode, end_tokens
from hf_memmix.training.chat_rows import chat_template, render
from hf_memmix.training.text_files import Conversation


class _Answer(TextStreamer):
    """Prints an answer while it is generated, with special tokens, but without the one that ends the turn."""

    def __init__(self, tokenizer, ends: set[int]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=False)
        self.ends = ends

    def put(self, value):
        if self.next_tokens_are_prompt or value.numel() != 1 or int(value) not in self.ends:
            super().put(value)


@dataclass
class Turn:
    """An answer, its number of tokens, and how many tokens were read for it, of how many in the conversation."""

    text: str
    new_tokens: int
    read_tokens: int
    all_tokens: int


@dataclass
class Chat:
    """A conversation with a loaded model.

    Args:
        options: further arguments of `generate()`.
        system: the first message, or None.
    """

    model: object
    tokenizer: object
    options: dict
    system: str | None = None
    messages: list[dict] = field(default_factory=list)

    def __post_init__(self):
        chat_template(self.tokenizer, "--chat was given")
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.ends = end_tokens(self.model.generation_config, self.tokenizer)
        self._text, self._ids, self._cache = "", [], None

    def say(self, message: str, stream: bool = True) -> Turn:
        """Add a message of the user, and answer it. `stream`: print the answer while it is generated.

        Raises:
            ValueError: the message does not fit the template or the vocabulary, or the conversation is too long.
        """
        import torch

        messages = [*self.messages, {"role": "user", "content": message}]
        text = render(Conversation(messages, None, "the conversation"), self.tokenizer, prompt=True, today=True)
        if self._cache is not None and text.startswith(self._text):
            ids = self._ids + encode(text[len(self._text) :], self.tokenizer)
            known = len(self._ids) - 1  # generate() has not read the last token of an answer
        else:
            ids, known, self._cache = encode(text, self.tokenizer), 0, None
        check_tokens(ids, self.model, self.tokenizer, "the conversation")
        total = len(ids) + self.options["max_new_tokens"]
        check_length(self.model, "model", total, "the conversation with --max-new-tokens", "start a new one")
        known_turns = {} if self._cache is None else {CACHE: self._cache}
        self._cache = None  # generate() changes it: after an interrupted answer, the conversation is read again
        tokens = torch.tensor([ids], device=self.model.device)
        out = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),  # without it, the library hides padding tokens that a user writes
            **known_turns,
            streamer=_Answer(self.tokenizer, self.ends) if stream else None,
            eos_token_id=sorted(self.ends),
            return_dict_in_generate=True,
            **self.options,
        )
        new = out.sequences[0, len(ids) :].tolist()
        answer = self.tokenizer.decode(new[:-1] if new[-1] in self.ends else new)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self._ids, self._text, self._cache = ids + new, text + self.tokenizer.decode(new), out[CACHE]
        return Turn(answer, len(new), len(ids) - known, len(ids))
