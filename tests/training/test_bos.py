"""Rows of training and of measurements begin as the tokenizer begins a text; without BOS nothing changes."""

import pytest
import torch
from torch import nn

from cli_runner import memmix
from hf_memmix.conversion import convert_model, save_student
from hf_memmix.conversion.compare import compare_models
from hf_memmix.conversion.text_rows import beginning_of, cut_rows
from hf_memmix.training.data import StreamedBlocks, TokenBlocks, tokenize_files, tokenizer_hash
from hf_memmix.training.evaluation.probes import Material
from hf_memmix.training.evaluation.selection_data import SelectionData
from tiny_teachers import WORDS, bos_tokenizer, positions_of, tiny_teacher, tiny_text, tiny_tokenizer

BOS, END = 1, 2
FIRST = 4  # the first token that is a word


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Texts, and for both tokenizers a teacher and a student without attention."""
    folder = tmp_path_factory.mktemp("bos")
    teacher = tiny_teacher("llama", layers=2)
    for name, tokenizer in (("bos", bos_tokenizer()), ("plain", tiny_tokenizer())):
        save_student(teacher, folder / name / "teacher", tokenizer)
        save_student(convert_model(teacher, "gka"), folder / name / "student", tokenizer)
    (folder / "text.txt").write_text(tiny_text(700))
    (folder / "rows.jsonl").write_text("".join(f'{{"text": "{tiny_text(n, n).strip()}"}}\n' for n in range(5, 60)))
    return folder


def words(row):
    return [token for token in row if token >= FIRST]


# ---- rows


def test_a_row_that_is_cut_in_a_document_begins_like_a_document():
    rows = list(cut_rows([[BOS, 10, 11, END], [BOS, 20, 21, 22, 23, 24, END]], 4, [BOS]))
    assert [row for row, _ in rows] == [[BOS, 10, 11, END], [BOS, 20, 21, 22], [BOS, 23, 24, END]]
    rows = list(cut_rows([[BOS, 10, END], [BOS, 20, 21, 22, END]], 5, [BOS]))
    assert [row for row, _ in rows] == [[BOS, 10, END, BOS, 20], [BOS, 21, 22, END]]
    assert [places for _, places in rows] == [[0, 1, 2, 0, 1], [0, 1, 2, 3]]
    assert [row for row, _ in cut_rows([[BOS, 10, 11, END]], 3, [])] == [[BOS, 10, 11], [END]]
    with pytest.raises(ValueError, match="rows of 1 tokens .* 1 tokens that begin a text"):
        list(cut_rows([[BOS, 10]], 1, [BOS]))


@pytest.mark.parametrize("pack", [False, True])
def test_rows_of_training(workspace, pack):
    """One BOS for each document, one more for each row that is cut in a document, and no word is lost."""
    file, tokenizer = workspace / "rows.jsonl", bos_tokenizer()
    stream = tokenize_files(file, tokenizer).tolist()
    assert stream.count(BOS) == stream.count(END) == 55 and stream[0] == BOS
    for bos in ("rows", "documents"):
        data = TokenBlocks.from_files(file, tokenizer, 16, pack, bos)
        rows = data.blocks.tolist()
        joined = [token for row in rows for token in row]
        assert words(joined) == words(stream)[: len(words(joined))]
        if bos == "rows":
            assert all(row[0] == BOS for row in rows)
            assert all((BOS, BOS) not in zip(row[:-1], row[1:], strict=True) for row in rows)
        else:
            assert joined == stream[: len(joined)]
        if pack and bos == "rows":
            assert ((data.positions == 0) == (data.blocks == BOS)).all(), "one BOS for each packed part"
        read = StreamedBlocks(file, tokenizer, 16, pack, bos)
        for whole, item in zip(data, read.one_pass(), strict=True):
            assert whole.keys() == item.keys() and all(torch.equal(whole[name], item[name]) for name in whole)
    with pytest.raises(ValueError, match="bos is 'row'; it must be one of rows, documents"):
        TokenBlocks.from_files(file, tokenizer, 16, bos="row")


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("bos", ["rows", "documents"])
def test_rows_of_a_tokenizer_without_bos_are_the_cut_stream(workspace, pack, bos):
    file, tokenizer = workspace / "rows.jsonl", tiny_tokenizer()
    data = TokenBlocks.from_files(file, tokenizer, 16, pack, bos)
    stream = tokenize_files(file, tokenizer)
    assert torch.equal(data.blocks.flatten(), stream[: data.blocks.numel()]) and BOS not in stream
    if pack:
        lengths = torch.diff((stream == END).nonzero()[:, 0], prepend=torch.tensor([-1])).tolist()
        assert torch.equal(data.positions, positions_of(lengths, 16))


def test_the_hash_of_a_tokenizer_says_how_it_begins():
    assert tokenizer_hash(bos_tokenizer()) != tokenizer_hash(tiny_tokenizer())
    assert (beginning_of(bos_tokenizer()), beginning_of(tiny_tokenizer())) == ([BOS], [])
    material = Material(bos_tokenizer(), tiny_text(300))
    assert material.start == [BOS] and BOS not in material.filler


def test_rows_and_record_of_select(workspace):
    """Scores that were kept for rows without BOS are not those of rows with it."""
    tokenizers = bos_tokenizer(), tiny_tokenizer()
    of = {"tasks": "none", "length": 32, "samples": 1, "max_tokens": 400, "seed": 0, "weight": 1.0}
    with_bos, without = (SelectionData.of(tokenizer, text=workspace / "text.txt", **of) for tokenizer in tokenizers)
    assert (with_bos.blocks[:, 0] == BOS).all() and (without.blocks != BOS).all()
    assert torch.equal(without.blocks.flatten(), tokenize_files(workspace / "text.txt", tiny_tokenizer())[:384])
    assert with_bos.record["settings"] != without.record["settings"]


# ---- commands


@pytest.fixture
def seen():
    """The token ids [T] of all texts that a model has read."""
    rows = []

    def note(module, args):
        if isinstance(module, nn.Embedding):
            rows.extend(row for row in args[0].flatten(0, -2).tolist() if len(row) > 4)  # not of a check

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    yield rows
    handle.remove()


TRAINED = ["--student", "student", "--out", "out", "--steps", 2, "--batch-size", 4, "--block-size", 16]
COMMANDS = {
    "align": ["align", *TRAINED],
    "stream": ["align", "--stream", *TRAINED],
    "distill": ["distill", *TRAINED],
    "cache": ["cache-teacher", "--out", "out", "--block-size", 16, "--top-k", 4],
    "report": ["report", "--student", "student", "--block-size", 16],
    "select": ["select", "--student", "student", "--out", "plan.json", "--length", 32, "--samples", 1],
    "eval": ["eval", "student", "--out", "out", "--lengths", 48, "--samples", 1, "--tasks", "niah"],
}


@pytest.mark.product_rows(r"plain-(?!report\])")  # all commands ask one function what begins a row
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("tokenizer", ["bos", "plain"])
def test_every_row_that_a_command_reads_begins_with_bos(workspace, tmp_path, seen, name, tokenizer):
    places = {name: tmp_path / name for name in ("out", "plan.json")}
    places["student"] = workspace / tokenizer / "student"
    command = [places.get(part, part) for part in COMMANDS[name]]
    result = memmix(*command, "--teacher", workspace / tokenizer / "teacher", "--text", workspace / "text.txt")
    assert result.exit_code == 0, result.output
    assert seen and {row[0] == BOS for row in seen} == {tokenizer == "bos"}


def test_a_report_predicts_words_alone(workspace):
    """A teacher that is the student: BOS is read and not predicted, so as many tokens count as there are others."""
    teacher = tiny_teacher("llama", layers=2)
    tokenizer, text = bos_tokenizer(), " ".join(WORDS * 4)
    found = compare_models(convert_model(teacher, "gka"), teacher, text, tokenizer, block_size=16)
    plain = compare_models(convert_model(teacher, "gka"), teacher, text, tiny_tokenizer(), block_size=16)
    assert found["tokens"] == len(WORDS) * 4, "each word is predicted from BOS or a word"
    assert plain["tokens"] == len(WORDS) * 4 - len(WORDS) * 4 // 16 - bool(len(WORDS) * 4 % 16)


def test_a_student_whose_tokenizer_begins_otherwise_is_refused(workspace):
    command = ["report", "--student", workspace / "plain" / "student", "--teacher", workspace / "bos" / "teacher"]
    result = memmix(*command, "--text", workspace / "text.txt")
    assert result.exit_code and "begin a text with other tokens ([] and [1])" in " ".join(result.output.split())
