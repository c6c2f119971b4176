"""Text files to token blocks, and the errors a user can run into."""

import pytest
import torch

from hf_memmix.conversion.saving import check_not_read
from hf_memmix.training.data import StreamedBlocks, TokenBlocks, tokenize_files
from tiny_teachers import tiny_tokenizer


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


def test_blocks_hold_the_stream_in_order(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 20)
    (tmp_path / "b.txt").write_text("and the dog ran to the sea " * 20)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    stream = tokenize_files(files, tokenizer)
    blocks = TokenBlocks.from_files(files, tokenizer, 16)
    joined = torch.cat([blocks[i]["input_ids"] for i in range(len(blocks))])
    torch.testing.assert_close(joined, stream[: len(joined)])
    assert len(stream) - len(joined) < 16
    assert (stream == tokenizer.eos_token_id).sum() == 2
    assert tokenizer.decode(stream[:3]).replace(" ", "") == "thecatsat"


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.JSONL"])
def test_json_lines_by_every_ending(tmp_path, tokenizer, name):
    """With the mark of a UTF-8 file and the line ends of Windows. Their syntax is no text to learn."""
    (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"text": "the cat"}\r\n\r\n{"text": "dog"}\r\n')
    tokens = tokenizer.convert_ids_to_tokens(tokenize_files(tmp_path / name, tokenizer).tolist())
    assert tokens == ["the", "cat", "</s>", "dog", "</s>"]


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "the cat"}, {"text": "dog"}]',
        '[\n  {\n    "text": "the cat"\n  },\n  {"text": "dog"}\n]\n',
        '["the cat", "dog"]',
        '{"text": "the cat"}\n{"text": "dog"}\n',
    ],
)
def test_json_files_of_every_form(tmp_path, tokenizer, content):
    (tmp_path / "a.json").write_text(content)
    tokens = tokenizer.convert_ids_to_tokens(tokenize_files(tmp_path / "a.json", tokenizer).tolist())
    assert tokens == ["the", "cat", "</s>", "dog", "</s>"]
    (tmp_path / "a.json").write_text('{\n "text":\n "the cat"\n}')
    tokens = tokenizer.convert_ids_to_tokens(tokenize_files(tmp_path / "a.json", tokenizer).tolist())
    assert tokens == ["the", "cat", "</s>"]


def test_a_link_that_leads_back_to_itself_is_one_clear_line(tmp_path, tokenizer):
    for one, other in (("a.txt", "b.txt"), ("b.txt", "a.txt")):
        (tmp_path / one).symlink_to(tmp_path / other)
    with pytest.raises(ValueError, match="^text file '.*a.txt' is a symbolic link that leads to no file; correct it$"):
        tokenize_files(tmp_path / "a.txt", tokenizer)
    with pytest.raises(ValueError, match="'.*a.txt' is a symbolic link that leads back to itself; remove it$"):
        check_not_read(tmp_path / "out", tmp_path / "a.txt")


def test_fingerprint_depends_on_tokens_and_block_size():
    a = TokenBlocks(torch.arange(64), 8)
    assert a.fingerprint() == TokenBlocks(torch.arange(64), 8).fingerprint()
    assert a.fingerprint() != TokenBlocks(torch.arange(64), 16).fingerprint()
    assert a.fingerprint() != TokenBlocks(torch.arange(1, 65), 8).fingerprint()


def test_the_last_token_of_a_vocabulary_is_the_size_minus_one():
    blocks = TokenBlocks(torch.arange(64), 8)
    blocks.check_vocabulary(64)
    with pytest.raises(ValueError, match="token 63 is outside the vocabulary of 63"):
        blocks.check_vocabulary(63)


def test_a_packed_stream_has_another_fingerprint(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 20)
    prints = [StreamedBlocks(tmp_path / "a.txt", tokenizer, 16, pack).fingerprint() for pack in (False, True, True)]
    assert prints[0] != prints[1] == prints[2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "holds no text"),
        (b" \n\t ", "holds no text"),
        (b"abc\x00def", "is binary"),
        (b"\xff\xfe\xe9 text", "is not UTF-8"),
        (b"the cat", "do not fill one block of 16"),
    ],
)
def test_bad_input_is_a_clear_error(tmp_path, tokenizer, content, message):
    file = tmp_path / "input.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        TokenBlocks.from_files(file, tokenizer, 16)


def test_folder_no_files_and_tiny_blocks(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="is a folder"):
        tokenize_files(tmp_path, tokenizer)
    with pytest.raises(ValueError, match="no text files"):
        tokenize_files([], tokenizer)
    with pytest.raises(ValueError, match="block_size is 1"):
        TokenBlocks(torch.arange(9), 1)
