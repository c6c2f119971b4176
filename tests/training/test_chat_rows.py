"""Conversations as training data: what counts, what is refused, and rows of every format."""

import gzip
import json
from dataclasses import replace
from datetime import datetime

import pytest
import torch

from cli_runner import memmix, result_of
from hf_memmix.conversion import convert_model, save_student
from hf_memmix.training.chat_rows import ends_a_turn, render
from hf_memmix.training.data import StreamedBlocks, TokenBlocks, tokenize_documents
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.student_teacher import AlignStudentTeacher, DistillStudentTeacher
from hf_memmix.training.text_files import Conversation
from hf_memmix.training.train import train
from tiny_teachers import CHAT, MARKED, chat_tokenizer, tiny_teacher, tiny_tokenizer

MESSAGES = [
    {"role": "user", "content": "who is the cat?"},
    {"role": "assistant", "content": " the cat 🐈 is\nhere  "},
    {"role": "user", "content": "and he?"},
    {"role": "assistant", "content": "away"},
]
# it leaves out the words of earlier answers, as templates leave out thoughts
FORGETFUL = CHAT.replace("m.content", "(m.content if loop.last or m.role == 'user' else '...')")
# it writes the day of today, and a prompt of the system before the first message
DATED = "{% if messages %}{{ strftime_now('%d %b %Y') }}{% endif %}" + CHAT
OF_PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('a user speaks first') }}{% endif %}" + CHAT


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def chats(tmp_path):
    return write_rows(tmp_path / "chats.jsonl", [{"messages": MESSAGES}, {"messages": MESSAGES[:2]}])


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_the_tokens_before_an_answer_count(chats, template):
    """Counted is the token from which the next one, of an answer or its end, is predicted."""
    tokenizer = chat_tokenizer(template)
    first, second = tokenize_documents(chats, tokenizer, loss="answers")
    for (tokens, counted), count in ((first, 4), (second, 2)):
        assert tokens == tokenizer.apply_chat_template(MESSAGES[:count], tokenize=True, return_dict=False)
        predicted = [token for token, before in zip(tokens[1:], counted, strict=False) if before]
        said = "".join(message["content"] + "<|im_end|>" for message in MESSAGES[1:count:2])
        assert tokenizer.decode(predicted) == said
        assert not counted[-1]


@pytest.mark.parametrize(
    ("template", "rows", "named"),
    [
        (FORGETFUL, [{"messages": MESSAGES}], "line 1 of .*generation.*--loss all"),
        (CHAT, [{"messages": MESSAGES[:1]}], "line 1 of "),
        (CHAT, [{"text": "a"}], "--loss all"),
        (STRICT, [{"messages": MESSAGES[:2]}, {"messages": MESSAGES[1:2]}], "line 2 of .*a user speaks first"),
        (None, [{"messages": MESSAGES}], "line 1 of .*chat_template.jinja"),
        (CHAT, [{"messages": [{"from": "human", "value": "a"}]}], "line 1 of .*from, value.*role"),
        (CHAT, [{"messages": "a list as text"}], "line 1 of .*'messages'"),
        (CHAT, [{"text": "a", "messages": MESSAGES}], "line 1 of .*text and messages.*--text-field"),
        (CHAT, [{"body": "a", "title": "b"}], "line 1 of .*--text-field.*body, title"),
        (CHAT, [{"messages": MESSAGES, "tools": "a search"}], "line 1 of .*tools"),
        (CHAT, [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], "line 1 of .*'image'"),
        ({"other": CHAT}, [{"messages": MESSAGES}], "line 1 of .*template"),
        (OF_PARTS, [{"messages": MESSAGES}], "line 1 of .*does not write what the user says"),
    ],
)
def test_conversations_that_are_refused(tmp_path, template, rows, named):
    file = write_rows(tmp_path / "x.jsonl", rows)
    with pytest.raises(ValueError, match=named):
        list(tokenize_documents(file, chat_tokenizer(template), loss="answers"))


@pytest.mark.parametrize("template", [CHAT, MARKED, DATED, {"default": CHAT, "tool_use": MARKED}])
def test_an_answer_without_a_question_counts(tmp_path, template):
    """It is the first message. The template of conversations with tools has its own marks; parts are joined."""
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    rows = [{"messages": [{"role": "assistant", "content": parts}], "tools": [{"name": "search"}]}]
    tokenizer = chat_tokenizer(template)
    ((tokens, counted),) = tokenize_documents(write_rows(tmp_path / "x.jsonl", rows), tokenizer, loss="answers")
    predicted = [token for token, before in zip(tokens[1:], counted, strict=False) if before]
    assert tokenizer.decode(predicted) == "the cat<|im_end|>"


def test_training_data_have_the_same_date_every_day(chats):
    """Directives of all kinds; a chat has the date of today."""
    formats = "%A %-d. %B %Y, %j %H:%M%%"
    head = "{% macro head() %}{{ strftime_now('" + formats + "') }}{% endmacro %}\n"
    tokenizer = chat_tokenizer(head + "{% for m in messages %}{{ m.content }}{% endfor %}{{ head() }}\n")
    (tokens, _), *_ = tokenize_documents(chats, tokenizer)
    assert tokenizer.decode(tokens).endswith("Friday 26. July 2024, 208 00:00%")
    today = render(Conversation(MESSAGES, None, ""), tokenizer, today=True)
    assert today[:-6].endswith(datetime.now().strftime(formats)[:-6])


def test_a_stream_with_another_template_is_another_run(chats):
    """Also if the first documents are the same."""
    streams = [StreamedBlocks(chats, chat_tokenizer(template), 16) for template in (CHAT, CHAT + "{# #}")]
    assert streams[0].fingerprint() != streams[1].fingerprint()


def test_a_template_that_changes_the_last_turn_only_is_used_for_one_turn(tmp_path):
    file = write_rows(tmp_path / "x.jsonl", [{"messages": MESSAGES[:2]}])
    ((tokens, counted),) = tokenize_documents(file, chat_tokenizer(FORGETFUL), loss="answers")
    assert sum(counted) == len(chat_tokenizer().encode(MESSAGES[1]["content"])) + 1


def test_a_document_does_not_end_with_the_end_of_a_turn(tmp_path):
    """A text has no end where the template's turns end with that token; without a template it has one."""
    file = write_rows(tmp_path / "x.jsonl", [{"text": "the cat"}, {"messages": MESSAGES[:2]}])
    tokenizer = chat_tokenizer()
    (text, _), (chat, _) = tokenize_documents(file, tokenizer)
    assert tokenizer.decode(text) == "the cat" and chat.count(tokenizer.eos_token_id) == 2
    rows = TokenBlocks.from_files(file, tokenizer, 16, pack=True)
    starts = (rows.positions.flatten() == 0).nonzero()[:, 0].tolist()
    assert starts == sorted({len(text), *range(0, rows.positions.numel(), 16)})
    tokenizer.chat_template = None
    (text, _), *_ = tokenize_documents(write_rows(file, [{"text": "the cat"}]), tokenizer)
    assert tokenizer.decode(text) == "the cat<|im_end|>"
    other = chat_tokenizer(CHAT.replace("im_end", "about_b"))
    other.eos_token = "<|about_b|>"
    assert ends_a_turn(other) and not ends_a_turn(chat_tokenizer(CHAT.replace("im_end", "b")))


def test_tools_reach_the_template(tmp_path):
    template = "{% if tools %}{{ tools[0].name }}{% endif %}" + CHAT
    rows = [{"messages": MESSAGES[:2], "tools": [{"name": "search"}]}, {"messages": MESSAGES[:2], "tools": None}]
    tokenizer = chat_tokenizer(template)
    first, second = tokenize_documents(write_rows(tmp_path / "x.jsonl", rows), tokenizer, loss="answers")
    assert tokenizer.decode(first[0]).startswith("search<|im_start|>") and len(first[0]) == len(second[0]) + 6
    assert sum(first[1]) == sum(second[1])


@pytest.mark.parametrize("kind", ["json", "jsonl.gz", "parquet", "csv", "tsv.gz", "hub"])
def test_the_same_rows_in_every_format(tmp_path, kind):
    """Texts under another name in tables, messages in the others; a table fills missing keys of messages by None."""
    import pyarrow
    from pyarrow import csv, parquet

    file, tokenizer, field = tmp_path / f"x.{kind}", chat_tokenizer(), None
    texts = ["the cat, and\nhe", 'a "word" ' * 20_000]
    rows = [{"messages": MESSAGES[:2]}, {"messages": [MESSAGES[0] | {"name": "one"}, MESSAGES[1]]}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "json":
        file.write_text(json.dumps(rows, indent=1))
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress(lines.encode()))
    elif kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif kind == "hub":
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "train.jsonl").write_text(lines)
        file = f"hub:{tmp_path / 'set'}"
    else:
        rows, field = [{"body": text, "text": "not this"} for text in texts], "body"
        table, out = pyarrow.Table.from_pylist(rows), pyarrow.BufferOutputStream()
        csv.write_csv(table, out, csv.WriteOptions(delimiter="\t" if "tsv" in kind else ","))
        content = out.getvalue().to_pybytes()
        file.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    read = [tokens for tokens, _ in tokenize_documents(file, tokenizer, field)]
    wanted = [tokenizer.encode(text) for text in texts]
    if field is None:
        wanted = [tokenizer.apply_chat_template(row["messages"], return_dict=False) for row in rows]
    assert read == wanted


def test_a_field_that_no_source_has_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("the cat")
    with pytest.raises(ValueError, match="x.txt.*--text-field.*'body'"):
        list(tokenize_documents(tmp_path / "x.txt", tiny_tokenizer(), "body"))
    file = write_rows(tmp_path / "x.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match="line 1 of .*'body'"):
        list(tokenize_documents(file, tiny_tokenizer(), "body"))
    cut = tmp_path / "x.jsonl.gz"
    cut.write_bytes(gzip.compress(file.read_bytes() * 100)[:-9])
    with pytest.raises(ValueError, match="x.jsonl.gz"):
        list(tokenize_documents(cut, tiny_tokenizer()))


@pytest.mark.parametrize("pack", [False, True])
def test_rows_without_answers_are_left_out_and_the_rest_is_counted(tmp_path, pack):
    rows = [{"messages": [{"role": "user", "content": "a" * 70}, {"role": "assistant", "content": "b" * 9}]}] * 3
    file, tokenizer = write_rows(tmp_path / "x.jsonl", rows), chat_tokenizer()
    data = TokenBlocks.from_files(file, tokenizer, 16, pack, loss="answers")
    every = TokenBlocks.from_files(file, tokenizer, 16, pack)
    assert 3 <= len(data) < len(every) and data.loss_mask.any(1).all()
    assert data.fingerprint() != TokenBlocks(data.blocks.flatten(), 16, data.positions).fingerprint()
    for whole, row in zip(data, StreamedBlocks(file, tokenizer, 16, pack, loss="answers").one_pass(), strict=True):
        assert whole.keys() == row.keys() and all(torch.equal(whole[name], row[name]) for name in row)


def test_the_loss_of_answers_is_the_mean_over_their_tokens(chats):
    """Against the KL of every token; all other predictions may change without effect on loss and gradients."""
    from hf_memmix.training.losses import forward_kl

    teacher = tiny_teacher("llama", layers=2, vocab_size=300)
    student = convert_model(teacher, "gka")
    data = TokenBlocks.from_files(chats, chat_tokenizer(), 32, loss="answers")
    batch = {name: torch.stack([data[i][name] for i in range(2)]) for name in data[0]}
    with torch.no_grad():
        each = forward_kl(student(batch["input_ids"]).logits, teacher(batch["input_ids"]).logits)
        loss = DistillStudentTeacher(student, teacher)(**batch)["loss"]
    torch.testing.assert_close(loss, each[batch["loss_mask"]].mean())
    assert not torch.allclose(loss, each.mean(), rtol=1e-2)


def test_accumulated_batches_weigh_their_tokens(tmp_path):
    """Rows with 2 and with 12 tokens that count: one batch of two rows trains as two batches of one row. A step in
    which no token counts has the loss 0. In `align`, the error of each batch is relative to its own teacher's outputs.
    """
    teacher = tiny_teacher("llama", layers=2, vocab_size=300)
    tokens = torch.randint(3, 300, (32,), generator=torch.Generator().manual_seed(0))
    data = TokenBlocks(tokens, 16, loss_mask=torch.arange(16) < torch.tensor([[2], [12]]))
    losses, students = [], []
    for batch, steps in ((2, 1), (1, 2)):
        students.append(convert_model(teacher, "gka"))
        how = {"batch_size": batch, "gradient_accumulation": steps, "block_size": 16, "loss": "answers"}
        recipe = Recipe(stage="distill", steps=1, warmup_steps=0, trainer={"optim": "sgd"}, **how)
        losses.append(train(students[-1], teacher, data, tmp_path / str(batch), recipe=recipe)["last_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for ours, theirs in zip(*(student.parameters() for student in students), strict=True):
        torch.testing.assert_close(ours, theirs)
    student, counts = convert_model(teacher, "gka"), torch.tensor([2.0, 12.0])
    parts = [{name: row[None] for name, row in data[i].items()} for i in range(2)]
    errors = torch.stack([AlignStudentTeacher(student, teacher)(**part)["loss"] for part in parts])
    found = train(student, teacher, data, tmp_path / "align", recipe=replace(recipe, stage="align"))["last_loss"]
    assert found == pytest.approx((errors * counts / counts.sum()).sum().item(), rel=1e-5)
    nothing = TokenBlocks(tokens, 16, loss_mask=torch.zeros(2, 16, dtype=torch.bool))
    assert (
        train(convert_model(teacher, "gka"), teacher, nothing, tmp_path / "nothing", recipe=recipe)["last_loss"] == 0
    )


def test_what_recipe_and_data_count_must_agree(chats, tmp_path):
    teacher = tiny_teacher("llama", layers=2, vocab_size=300)
    for data_loss, loss in (("all", "answers"), ("answers", "all")):
        data = TokenBlocks.from_files(chats, chat_tokenizer(), 16, loss=data_loss)
        recipe = Recipe(stage="distill", steps=1, batch_size=2, block_size=16, loss=loss)
        with pytest.raises(ValueError, match=f"{data_loss}.*{loss}"):
            train(convert_model(teacher, "gka"), teacher, data, tmp_path / "out", recipe=recipe)


def test_commands_train_on_answers(tmp_path, chats):
    """Both stages, layer by layer too, and a cache of the teacher: both give the same first loss."""
    teacher = tiny_teacher("llama", layers=2, vocab_size=300)
    save_student(teacher, tmp_path / "teacher", chat_tokenizer())
    save_student(convert_model(teacher, "gka"), tmp_path / "student", chat_tokenizer())
    texts = ["--teacher", tmp_path / "teacher", "--text", chats, "--loss", "answers", "--block-size", "16"]
    run = ["--student", tmp_path / "student", *texts, "--steps", "2", "--batch-size", "2", "--json"]
    losses = [result_of(memmix("align", *run, *more, "--out", tmp_path / f"aligned{len(more)}"))["first_loss"]
              for more in ([], ["--stream"], ["--loss", "all"])]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) != losses[2]
    assert memmix("cache-teacher", *texts, "--top-k", "300", "--out", tmp_path / "cache").exit_code == 0
    (tmp_path / "cached.yaml").write_text(f"stage: distill\nteacher: cache:{tmp_path / 'cache'}\n")
    losses = []
    for name, recipe in (("plain", "distill"), ("cached", tmp_path / "cached.yaml")):
        result = memmix("distill", *run, "--recipe", recipe, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
        losses.append(json.loads(result.stdout)["first_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
