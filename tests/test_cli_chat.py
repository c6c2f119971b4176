"""`memmix generate --chat`: turns in one state, and what is shown."""

import io
import json

import pytest
import torch
from transformers.utils import ModelOutput
from typer.testing import CliRunner

from cli_runner import memmix, result_of
from hf_memmix._generation_hooks import CACHE
from hf_memmix.commands import app
from hf_memmix.commands.generate import _lines
from hf_memmix.conversion import convert_model, save_student
from hf_memmix.training.chat import Chat
from tiny_teachers import CHAT, chat_tokenizer, tiny_teacher, tiny_tokenizer

TRIMS = CHAT.replace("m.content", "m.content[:1]")  # changes what the model has said


def student(keep):
    """A student that keeps these layers; for None its teacher."""
    teacher = tiny_teacher("llama", layers=2, vocab_size=300)
    return teacher if keep is None else convert_model(teacher, "gka", keep=keep)


@pytest.fixture
def folder(tmp_path):
    save_student(student([1]), tmp_path / "student", chat_tokenizer())
    return tmp_path / "student"


def turns(chat, model):
    """The answers of three turns, and the numbers of tokens that the model read at once."""
    read = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    said = [chat.say(message, stream=False) for message in ("who is the cat?", "and he?", "where?")]
    return said, [count for count in read if count > 1]


@pytest.mark.parametrize("keep", ["none", [1], None])
@pytest.mark.parametrize("template", [CHAT, TRIMS])
def test_a_turn_is_what_the_whole_conversation_gives(keep, template, monkeypatch):
    """Against generate() on all tokens without a cache. A template that changes earlier turns is read as a whole.

    The old name of the cache, of which the library warns, is not asked for.
    """
    if CACHE != "past_key_values":
        monkeypatch.delattr(ModelOutput, "past_key_values")
    model, tokenizer = student(keep), chat_tokenizer(template)
    # only answers of single ASCII letters, which a text gives back as the same tokens
    suppressed = [0, 1, tokenizer.convert_tokens_to_ids("h"), *range(97, 300)]
    options = {"do_sample": False, "max_new_tokens": 6, "suppress_tokens": suppressed}
    chat = Chat(model, tokenizer, options, system="be brief")
    said, read = turns(chat, model)
    for index, turn in enumerate(said):
        start = 2 + 2 * index
        prompt = tokenizer.apply_chat_template(chat.messages[:start], tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer.encode(prompt)])
        fresh = model.generate(ids, **options, eos_token_id=[2])[0, ids.shape[1] :].tolist()
        assert turn.text == tokenizer.decode(fresh[:-1] if fresh[-1] == 2 else fresh)
        assert turn.new_tokens == len(fresh) and turn.all_tokens == ids.shape[1]
    wanted = [turn.read_tokens for turn in said]
    assert read == wanted and wanted[0] == said[0].all_tokens
    for before, turn in zip(said, said[1:], strict=False):
        again = turn.all_tokens if template == TRIMS else turn.all_tokens - before.all_tokens - before.new_tokens + 1
        assert turn.read_tokens == again


def test_an_interrupted_answer_leaves_no_trace():
    """A message may hold the padding token, which is read as every other token."""
    model, tokenizer = student("none"), chat_tokenizer()
    options = {"do_sample": False, "max_new_tokens": 4}
    whole, broken = (Chat(model, tokenizer, options) for _ in range(2))
    for chat in (whole, broken):
        chat.say("who <|im_end|> is", stream=False)
    ids = torch.tensor([tokenizer.apply_chat_template(whole.messages[:1], add_generation_prompt=True)["input_ids"]])
    fresh = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
    assert whole.messages[1]["content"] == tokenizer.decode(fresh[:-1] if fresh[-1] == 2 else fresh)

    def interrupt(*args):
        raise KeyboardInterrupt

    handle = model.lm_head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        broken.say("he", stream=False)
    handle.remove()
    assert broken.say("and she?", stream=False).text == whole.say("and she?", stream=False).text
    assert broken.messages == whole.messages


def test_one_message(folder):
    run = ["generate", "--chat", "--model", folder, "--max-new-tokens", 8, "--temperature", 0]
    result = result_of(memmix(*run, "--prompt", "who?", "--system", "be brief", "--json"))
    assert [message["role"] for message in result["messages"]] == ["system", "user", "assistant"]
    assert result["messages"][2]["content"] == result["text"] != ""
    shown = memmix(*run, "--prompt", "who?", "--system", "be brief")
    assert shown.exit_code == 0 and shown.stdout.strip() == result["text"].strip()


def test_lines_of_the_input_are_messages(folder):
    arguments = ["generate", "--chat", "--model", str(folder), "--max-new-tokens", "4", "--temperature", "0"]
    run = CliRunner().invoke(app, arguments, input="who?\n\nand he?\n")
    assert run.exit_code == 0, run.output
    assert run.stderr.count("tokens/s") == 2
    other = CliRunner().invoke(app, arguments, input=b"who?\n\xe4\n")
    assert other.exit_code == 1 and "input is not UTF-8" in other.stderr


def test_the_prompt_of_a_terminal_is_not_in_the_answers(monkeypatch, capsys):
    """The input is a terminal, the output a file."""
    keyboard = io.StringIO("who?\n\nhe\n")
    keyboard.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", keyboard)
    assert list(_lines()) == ["who?", "he"]
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("> ") == 4


def test_special_tokens_are_shown_but_not_the_end_of_a_turn(folder, capsys):
    """The end-of-sequence token here ends every answer after a start token, which is shown."""
    model, tokenizer = student("none"), chat_tokenizer()
    answers = iter([1, 70, 2])
    head = model.get_output_embeddings()
    next_token = {"id": None}

    def forced(module, args, output):
        next_token["id"] = next(answers)
        forced_logits = torch.full_like(output, -100.0)
        forced_logits[..., next_token["id"]] = 100.0
        return forced_logits

    head.register_forward_hook(forced)
    turn = Chat(model, tokenizer, {"do_sample": False, "max_new_tokens": 5}).say("who?")
    word = tokenizer.decode([70])
    assert turn.text == f"<|im_start|>{word}" and capsys.readouterr().out.strip() == turn.text
    assert turn.new_tokens == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--prompt"),
        (["--prompt", "a", "--system", "b"], "--system"),
        (["--chat", "--json"], "--json"),
        (["--chat", "--prompt", ""], "empty"),
    ],
)
def test_options_that_would_be_ignored(folder, arguments, named):
    run = memmix("generate", "--model", folder, *arguments)
    assert run.exit_code == 1 and named in run.output and "Traceback" not in run.output


def test_a_model_without_a_template_does_not_chat(tmp_path):
    save_student(tiny_teacher("llama", layers=1), tmp_path / "base", tiny_tokenizer())
    run = memmix("generate", "--model", tmp_path / "base", "--chat", "--prompt", "a")
    assert run.exit_code == 1 and "chat_template.jinja" in run.output
    assert json.loads((tmp_path / "base" / "config.json").read_text())["vocab_size"] == 64
