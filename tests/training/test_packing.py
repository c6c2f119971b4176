"""Packed documents train like separate ones, whatever they are read from."""

import json
import re

import pytest
import torch

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.teacher_forcing import run_teacher_forced
from hf_memmix.training.data import StreamedBlocks, TokenBlocks
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.student_teacher import AlignStudentTeacher, DistillStudentTeacher
from hf_memmix.training.teacher_cache import write_cache
from hf_memmix.training.train import train
from tiny_runs import StopBefore, Stopped, changed, weights
from tiny_teachers import positions_of, tiny_teacher, tiny_text, tiny_tokenizer

LENGTHS = [5, 3, 8, 11, 5]  # two rows of 16; the fourth document goes on from the first row to the second


def pieces(blocks):
    """The documents of each row, from the position ids."""
    for row in range(len(blocks)):
        item = blocks[row]
        starts = [*(item["position_ids"] == 0).nonzero()[:, 0].tolist(), 16]
        yield from (item["input_ids"][None, a:b] for a, b in zip(starts, starts[1:], strict=False))


@pytest.fixture
def packed():
    tokens = torch.randint(3, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return TokenBlocks(tokens, 16, positions_of(LENGTHS, 16))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("keep", ["none", [1]])
def test_a_packed_row_is_its_documents(packed, family, keep):
    """Losses of both stages and every mixer's output, with kept attention layers and without."""
    teacher = tiny_teacher(family, layers=2)
    student = convert_model(teacher, "gka", keep=keep)
    batch = {name: torch.stack([packed[i][name] for i in range(2)]) for name in ("input_ids", "position_ids")}

    def outputs(**inputs):
        seen = {}
        run_teacher_forced(teacher, student, visit=lambda layer, *both: seen.update({layer: both}), **inputs)
        return seen

    with torch.no_grad():
        together = outputs(**batch)
        alone = [outputs(input_ids=piece) for piece in pieces(packed)]
        for layer, both in together.items():
            for side, tensor in enumerate(both):
                separate = torch.cat([piece[layer][side][0] for piece in alone])
                torch.testing.assert_close(tensor.flatten(0, 1), separate, rtol=1e-4, atol=1e-4)
        pair = DistillStudentTeacher(student, teacher)
        each = [(pair(input_ids=piece)["loss"], piece.numel()) for piece in pieces(packed)]
        mean = sum(loss * count for loss, count in each) / 32
        torch.testing.assert_close(pair(**batch)["loss"], mean, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(pair(input_ids=batch["input_ids"])["loss"], mean, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "stage"), [("gpt_oss", "align"), ("gpt_oss", "distill"), ("gpt_oss", "cache"), ("biogpt", "align")]
)
def test_a_teacher_that_ignores_packing_is_refused(packed, tmp_path, family, stage):
    """Their masks are made without the positions, so their targets would mix documents that the student separates."""
    teacher = tiny_teacher(family, layers=2)
    student, options = convert_model(teacher, "gka"), {"steps": 1, "batch_size": 2, "block_size": 16, "pack": True}

    def run(data):
        if stage == "cache":
            write_cache(teacher, data, tmp_path / "cache", 4)
        else:
            train(student, teacher, data, tmp_path / "run", recipe=Recipe(stage=stage, **options))

    with pytest.raises(ValueError, match="DecoderLayer .* pack: false"):
        run(packed)
    run(TokenBlocks(packed.blocks.flatten(), 16))  # the hooks of the check are gone


def test_gradients_of_align_are_those_of_the_documents(packed):
    """One mixer, whose targets have the same size packed and not: gradients add up over the documents."""
    teacher = tiny_teacher("llama", layers=1)
    student = convert_model(teacher, "gka")
    pair = AlignStudentTeacher(student, teacher)
    weight = student.model.layers[0].self_attn.o_proj.weight
    sizes = []

    def size(layer, ours, theirs):
        sizes.append(theirs.square().sum())

    batch = {name: torch.stack([packed[i][name] for i in range(2)]) for name in ("input_ids", "position_ids")}
    (got,) = torch.autograd.grad(pair(**batch)["loss"], weight)
    want = 0.0
    for piece in pieces(packed):
        run_teacher_forced(teacher, student, piece, size)
        want = want + torch.autograd.grad(pair(input_ids=piece)["loss"] * sizes[-1], weight)[0]
    torch.testing.assert_close(got, want / sum(sizes), rtol=1e-4, atol=1e-6)


@pytest.fixture
def sources(tmp_path):
    import pyarrow
    from pyarrow import parquet

    texts = [tiny_text(words, seed=words) for words in (40, 25, 70, 33)]
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[1:3]) + "\n\n")
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": [texts[3], "  "]}), tmp_path / "c.parquet")
    return texts, [tmp_path / name for name in ("a.txt", "b.jsonl", "c.parquet")]


@pytest.mark.parametrize("pack", [False, True])
def test_every_format_gives_the_documents_in_order_in_memory_and_streamed(sources, pack):
    texts, files = sources
    tokenizer = tiny_tokenizer()
    blocks = TokenBlocks.from_files(files, tokenizer, 16, pack)
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    stream = torch.tensor([token for part in tokens for token in part])
    assert torch.equal(blocks.blocks.flatten(), stream[: blocks.blocks.numel()])
    assert len(stream) - len(blocks) * 16 < 16
    if pack:
        starts = (blocks.positions.flatten() == 0).nonzero()[:, 0].tolist()
        ends = torch.tensor([len(part) for part in tokens]).cumsum(0).tolist()
        assert set(starts) == {0, *range(0, len(blocks) * 16, 16), *ends[:-1]}
    reader = iter(StreamedBlocks(files, tokenizer, 16, pack))
    for epoch in range(2):
        for i in range(len(blocks)):
            row = next(reader)
            assert row.keys() == blocks[i].keys(), epoch
            assert all(torch.equal(row[key], blocks[i][key]) for key in row)


def test_a_folder_of_the_datasets_library_streams(sources):
    _, files = sources
    folder = files[0].parent / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text(files[1].read_text())
    tokenizer = tiny_tokenizer()
    rows = iter(StreamedBlocks(f"hub:{folder}", tokenizer, 16))
    wanted = TokenBlocks.from_files(files[1], tokenizer, 16)
    assert all(torch.equal(next(rows)["input_ids"], wanted[i]["input_ids"]) for i in range(len(wanted)))


@pytest.mark.product  # its parts have tests
def test_a_stream_trains_and_resumes_like_rows_in_memory(sources, tmp_path):
    """The order of a stream is the files'; a broken run reads on where it was, and other data are refused."""
    teacher, tokenizer = tiny_teacher("llama", layers=2), tiny_tokenizer()
    recipe = Recipe(steps=4, batch_size=2, block_size=16, learning_rate=1e-3, save_every=2, pack=True)

    def run(folder, files=sources[1], **options):
        student, data = convert_model(teacher, "gka"), StreamedBlocks(files, tokenizer, 16, True)
        return student, train(student, teacher, data, folder, recipe=recipe, **options)

    whole, result = run(tmp_path / "whole")
    assert result["tokens"] == 4 * 2 * 16
    with pytest.raises(Stopped):
        run(tmp_path / "broken", callbacks=[StopBefore(3)])
    resumed, _ = run(tmp_path / "broken")
    assert not changed(resumed, weights(whole))
    with pytest.raises(ValueError, match=r"belongs to another run \(data was"):
        run(tmp_path / "broken", sources[1][:2])


@pytest.mark.product  # one of several examples stays
@pytest.mark.parametrize("read", [TokenBlocks.from_files, StreamedBlocks])
def test_packed_documents_from_which_a_mixer_learns_nothing(read, tmp_path, caplog):
    """SKA reads a document from its second chunk on. Too short documents are refused, a majority of them is said."""
    teacher = tiny_teacher("llama", layers=2)
    recipe = Recipe(steps=1, batch_size=2, block_size=32, pack=True)

    def run(*lengths):
        text = "\n".join(json.dumps({"text": tiny_text(length)}) for length in lengths)
        (tmp_path / "x.jsonl").write_text(text)
        data = read(tmp_path / "x.jsonl", tiny_tokenizer(), 32, True)
        student = convert_model(teacher, "ska", chunk_size=8)
        return train(student, teacher, data, tmp_path / "out", recipe=recipe)

    with pytest.raises(ValueError, match="has [78] tokens.* ska .*at least 9 tokens; .*pack:"):
        run(*[7] * 12)
    assert not caplog.records
    run(30, *[7] * 12)
    (record,) = [record for record in caplog.records if record.name == "hf_memmix.training.train"]
    assert re.search(r"[67]\d % of the tokens .* fewer than 9 tokens.* ska .*pack: false", record.message)
    caplog.clear()
    run(*[8] * 12)  # with the token that ends a document, exactly 9
    run(*[30] * 3, *[7] * 2)
    assert not [record for record in caplog.records if record.name == "hf_memmix.training.train"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "a b"}\n{"text": \n', "line 2 of .* is not JSON"),
        ("x.jsonl", b'{"body": "a"}\n', r"line 1 of .*body"),
        ("x.jsonl", b"[1]\n", "line 1 of "),
        ("x.json", b"[1]\n", "item 1 of "),
        ("x.json", b'{"data":\n[1]}\n', "item 1 of .*data"),
        ("x.json", b'[{"text": "a"},\n', "line 2 of .* is not JSON"),
        ("x.json", b'{\n"text": "a"\n"id": 2}', "line 3 of .* is not JSON"),
        ("x.json", b'[{"text":\n"\xff"}]', "line 2 of .* is not JSON"),
        ("x.json", b"[" * 5000, "line 1 of .* is not JSON"),
        ("x.csv", b"body\na b\n", "line 2 of .*x.csv.*body"),
        ("x.csv", b'text\n"a b', "x.csv"),
        ("x.csv", b"id,text\n1,a b\n2,a, b\n", "line 3 of .*x.csv.* 3 fields.* 2;"),
        ("x.xlsx", b"PK", "x.xlsx.*[.]csv"),
        ("x.jsonl.gz", b"no gzip at all", "x.jsonl.gz"),
        ("x.jsonl", b"\x00\xff\n", "line 1 of .* is not JSON"),
        ("x.jsonl", b"", "holds no text"),
        ("x.parquet", b"no parquet at all", "is not a Parquet file"),
        ("x.parquet", b"", "is not a Parquet file"),
        ("x.parquet", None, "does not exist"),
    ],
)
@pytest.mark.parametrize("reader", [TokenBlocks.from_files, StreamedBlocks])
def test_broken_files_are_named(tmp_path, reader, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        next(iter(reader(tmp_path / name, tiny_tokenizer(), 16)))


def test_tables_of_another_column_and_texts_without_a_row_are_named(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="row 1 of .*x.parquet.*--text-field.*body"):
        TokenBlocks.from_files(tmp_path / "x.parquet", tiny_tokenizer(), 16)
    (tmp_path / "x.txt").write_text("the cat")
    for read in (lambda file: TokenBlocks.from_files(file, tiny_tokenizer(), 16),
                 lambda file: next(iter(StreamedBlocks(file, tiny_tokenizer(), 16)))):  # fmt: skip
        with pytest.raises(ValueError, match="do not fill one block of 16"):
            read(tmp_path / "x.txt")
    (tmp_path / "y.txt").write_text(tiny_text(50))
    stream = StreamedBlocks(tmp_path / "y.txt", tiny_tokenizer(), 16)
    stream.check_vocabulary(10)
    with pytest.raises(ValueError, match="outside the vocabulary of 10"):
        next(iter(stream))
