"""The teacher on disk: the same loss as the teacher in memory for k = V, and refused where it does not fit."""

import json
import pickle

import pytest
import torch

from hf_memmix.conversion import convert_model
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.losses import top_k_of
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.teacher_cache import META_FILE, CachedBlocks, teacher_hash, write_cache
from hf_memmix.training.train import train
from tiny_runs import SMALL_RUN, contents
from tiny_teachers import positions_of, tiny_teacher

OPTIONS = {"stage": "distill", "steps": 4, "learning_rate": 1e-3, **SMALL_RUN}
THREE_FILES = {"batch_size": 2, "shard_rows": 4}


@pytest.fixture
def teacher():
    return tiny_teacher("llama", layers=2)


@pytest.fixture
def data():
    tokens = torch.randint(3, 64, (176,), generator=torch.Generator().manual_seed(0))
    return TokenBlocks(tokens, 16, positions_of([20, 50, 7, 99], 16), "tokenizer")


@pytest.mark.parametrize("k", [5, 64])
def test_rows_hold_the_teachers_top_k(tmp_path, teacher, data, k):
    seen = []
    sizes = {"batch_size": 3, "shard_rows": 4, "chunk_tokens": 7}
    meta = write_cache(teacher, data, tmp_path / "c", k, progress=lambda *at: seen.append(at), **sizes)
    assert meta["rows"] == 11 and seen[-1] == (11, 11)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 3
    cached = CachedBlocks(data, tmp_path / "c", teacher)
    for i in range(11):
        row = cached[i]
        inputs = {name: row[name][None] for name in ("input_ids", "position_ids")}
        logits = teacher(**inputs, use_cache=False).logits[0]
        log_p, ids, rest = top_k_of(logits, k)
        torch.testing.assert_close(row["teacher_log_probs"].float(), log_p, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(row["teacher_log_rest"], rest, rtol=1e-4, atol=1e-4)
        if k == 5:
            assert torch.equal(row["teacher_ids"].long(), ids)


def test_a_run_on_the_cache_is_a_run_on_the_teacher(tmp_path, teacher, data):
    """k = V: the same losses up to the fp16 of the file; nothing but the cache is read."""
    write_cache(teacher, data, tmp_path / "c", 64)
    students = [convert_model(teacher, "gka", keep=[1]) for _ in range(2)]
    whole = train(students[0], teacher, data, tmp_path / "a", recipe=Recipe(**OPTIONS))
    recipe = Recipe(**OPTIONS, teacher=f"cache:{tmp_path / 'c'}")
    cached = train(students[1], None, data, tmp_path / "b", recipe=recipe)
    losses = [torch.tensor([entry["loss"] for entry in result["log"]]) for result in (whole, cached)]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=0)


def test_a_small_k_still_teaches(tmp_path, teacher, data):
    """And no run goes on with a cache of another dtype."""
    cache, options = tmp_path / "c", OPTIONS | {"steps": 12, "save_every": 2, "rest_learning_rate": 1e-3}
    write_cache(teacher, data, cache, 4)
    recipe = Recipe(**options, teacher=f"cache:{cache}")
    result = train(convert_model(teacher, "gka", keep=[1]), None, data, tmp_path / "run", recipe=recipe)
    assert result["last_loss"] < 0.8 * result["first_loss"]
    rows = CachedBlocks(data, cache)
    first, in_fp32 = rows[0], rows.fingerprint()
    sent = pickle.loads(pickle.dumps(rows))  # to a process that reads rows, where these are not forked
    assert all(torch.equal(value, first[name]) for name, value in sent[0].items())
    write_cache(teacher.bfloat16(), data, cache, 4, overwrite=True)
    assert CachedBlocks(data, cache).fingerprint() != in_fp32
    with pytest.raises(ValueError, match=r"another run \(data"):
        train(convert_model(teacher.float(), "gka", keep=[1]), None, data, tmp_path / "run", recipe=recipe)


def test_a_cache_of_something_else_is_refused(tmp_path, teacher, data):
    write_cache(teacher, data, tmp_path / "c", 4)
    CachedBlocks(data, tmp_path / "c", teacher)
    tokens, other = data.blocks.flatten(), tiny_teacher("llama", layers=2, seed=1)
    for rows, given, message in [
        (TokenBlocks(tokens.flip(0), 16, data.positions, "tokenizer"), None, "with other data"),
        (TokenBlocks(tokens, 16, None, "tokenizer"), None, "with other data"),
        (TokenBlocks(tokens, 8, None, "tokenizer"), None, "with other data"),
        (TokenBlocks(tokens, 16, data.positions, "another"), None, "with another tokenizer"),
        (data, other, "with another teacher"),
    ]:
        with pytest.raises(ValueError, match=message):
            CachedBlocks(rows, tmp_path / "c", given)
    with pytest.raises(ValueError, match="is no teacher cache"):
        CachedBlocks(data, tmp_path / "nothing")
    with pytest.raises(ValueError, match="k is 65; .* 64"):
        write_cache(teacher, data, tmp_path / "d", 65)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.fixture
def cache(tmp_path, teacher, data):
    write_cache(teacher, data, tmp_path / "c", 4, **THREE_FILES)
    return tmp_path / "c"


@pytest.mark.parametrize("damage", ["flipped", "exchanged", "truncated", "lost"])
def test_every_file_of_a_cache_is_checked(cache, data, damage):
    files = sorted(cache.glob("shard-*"))
    contents = [file.read_bytes() for file in files]
    for place, (file, content) in enumerate(zip(files, contents, strict=True)):
        if damage == "flipped":
            file.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
        elif damage == "exchanged":
            file.write_bytes(contents[place - 1])
            files[place - 1].write_bytes(content)
        elif damage == "truncated":
            file.write_bytes(content[:-1])
        else:
            file.unlink()
        problem = "is missing" if damage == "lost" else "is corrupt or truncated"
        with pytest.raises(ValueError, match=f"^shard-0000..*{problem}.*write the cache with memmix cache-teacher$"):
            CachedBlocks(data, cache)
        for path, written in zip(files, contents, strict=True):
            path.write_bytes(written)
    CachedBlocks(data, cache)


def test_every_field_of_the_meta_file_is_checked(cache, data):
    file = cache / META_FILE
    meta = json.loads(file.read_text())
    assert {"format", "k", "rows", "block_size", "shard_rows", "data", "teacher", "dtype", "files"} < meta.keys()
    changed = [meta | {name: {} if name in ("files", "config") else 0} for name in meta]
    without = [{key: value for key, value in meta.items() if key != name} for name in meta]
    for broken in [*changed, *without, {}]:
        file.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match="^[^\n]*write the cache with memmix cache-teacher$"):
            CachedBlocks(data, cache)
    earlier = {name: value for name, value in meta.items() if name not in ("files", "sha256")} | {"format": 1}
    file.write_text(json.dumps(earlier))
    with pytest.raises(ValueError, match="format 1, not 2.*BOS"):
        CachedBlocks(data, cache)
    file.write_text(json.dumps(meta))
    CachedBlocks(data, cache)


def test_a_cache_of_the_same_weights_with_another_config_is_refused(tmp_path, teacher, data):
    """E.g. YaRN was added to config.json since: same files of weights, other predictions."""
    folder, cache = tmp_path / "teacher", tmp_path / "c"
    teacher.save_pretrained(folder)
    write_cache(teacher, data, cache, 4, teacher_id=teacher_hash(folder))
    CachedBlocks(data, cache, folder)
    fields = json.loads((folder / "config.json").read_text())
    fields["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="with another config.json of the teacher .*rope_parameters.*write it again"):
        CachedBlocks(data, cache, folder)
    CachedBlocks(data, cache, teacher_hash(folder))  # a hash alone has no configuration


def test_a_teachers_hash_is_of_its_weights(tmp_path, teacher):
    teacher.save_pretrained(tmp_path / "a")
    tiny_teacher("llama", layers=2).save_pretrained(tmp_path / "b")
    tiny_teacher("llama", layers=2, seed=1).save_pretrained(tmp_path / "c")
    a, b, c = (teacher_hash(tmp_path / name) for name in "abc")
    assert a == b != c and teacher_hash(teacher) == teacher_hash(tiny_teacher("llama", layers=2)) != a
    with pytest.raises(ValueError, match="has no .*safetensors files"):
        teacher_hash(tmp_path)


class Killed(BaseException):
    """Ends a call as a kill does: no error that the code handles."""


def stop(done, total):
    if done > 8:
        raise Killed


@pytest.mark.parametrize("broken", [False, True])
def test_an_interrupted_cache_goes_on_and_ends_like_a_whole_one(tmp_path, teacher, data, broken):
    """Files that are whole are not computed again, one that is not is; until the end there is no cache."""
    write_cache(teacher, data, tmp_path / "whole", 5, **THREE_FILES)
    with pytest.raises(Killed):
        write_cache(teacher, data, tmp_path / "c", 5, progress=stop, **THREE_FILES)
    assert not (tmp_path / "c").exists()
    with pytest.raises(ValueError, match="is no teacher cache"):
        CachedBlocks(data, tmp_path / ".c.run")
    if broken:
        file = tmp_path / ".c.run" / "shard-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    seen = []
    write_cache(teacher, data, tmp_path / "c", 5, progress=lambda done, total: seen.append(done), **THREE_FILES)
    assert seen == [6, 8, 10, 11] if broken else seen == [10, 11]
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"c", "whole"}


def test_an_interrupted_cache_of_another_teacher_is_started_again(tmp_path, teacher, data):
    with pytest.raises(Killed):
        write_cache(tiny_teacher("llama", layers=2, seed=1), data, tmp_path / "c", 5, progress=stop, **THREE_FILES)
    for name in ("c", "whole"):
        write_cache(teacher, data, tmp_path / name, 5, **THREE_FILES)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")
