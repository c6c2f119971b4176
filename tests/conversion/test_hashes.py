"""Sealed files: whatever byte changes, they are refused in one line, or hold what was written."""

import shutil

import pytest
import torch

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.hashes import check_files, hash_files, open_sealed, read_sealed, save_sealed, write_sealed
from hf_memmix.conversion.layer_plan import write_plan
from hf_memmix.conversion.mixer_files import load_mixers, mixer_file, read_metadata, write_mixers
from hf_memmix.training.evaluation.mixer_search import saved_scores
from hf_memmix.training.streaming.planned import planned_student
from tiny_teachers import tiny_teacher


def changed_copies(file):
    """The content of a file with one bit changed, at one place after the other; then without its end."""
    content = file.read_bytes()
    for place in range(len(content)):
        yield content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    yield from (content[:-2], content[: len(content) // 2], b"")


def test_a_json_file_with_any_changed_bit(tmp_path):
    file, record = tmp_path / "a.json", {"k": 4, "name": "x", "list": [1.5, None], 3: (1, 2)}
    write_sealed(file, record)
    written = read_sealed(file, "again")
    assert written == {"k": 4, "name": "x", "list": [1.5, None], "3": [1, 2]}
    for content in changed_copies(file):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="^[^\n]*a.json[^\n]*; again$"):
            read_sealed(file, "again")
    with pytest.raises(ValueError, match="nothing.json' is not readable; again"):
        read_sealed(tmp_path / "nothing.json", "again")


def test_a_file_of_tensors_with_any_changed_bit(tmp_path):
    file = tmp_path / "a.safetensors"
    tensors = {"a": torch.randn(2, 3), "b": torch.randn(4).bfloat16(), "c": torch.tensor(7)}
    save_sealed(tensors, file, {"options": {"x": 1}})

    def read():
        with open_sealed(file, "again") as opened:
            return opened.record, {name: opened.read(name) for name in opened.names}

    record, values = read()
    assert record == {"options": {"x": 1}} and values.keys() == tensors.keys()
    refused = 0
    for content in changed_copies(file):
        file.write_bytes(content)
        try:
            found = read()
        except ValueError as error:
            refused += 1
            assert str(error).endswith("; again") and "a.safetensors" in str(error) and "\n" not in str(error)
        else:
            assert found[0] == record and all(torch.equal(found[1][name], tensors[name]) for name in tensors)
    assert refused > 0.9 * len(content)


def test_exchanged_and_lost_files_of_a_folder(tmp_path):
    for name in ("a", "b", "deep/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    hashes = hash_files(tmp_path, without=["b"])
    assert hashes.keys() == {"a", "deep/c"}
    check_files(tmp_path, hashes, "again")
    (tmp_path / "a").write_text("deep/c")
    with pytest.raises(ValueError, match="^a in .* is corrupt or truncated; again$"):
        check_files(tmp_path, hashes, "again")
    (tmp_path / "a").unlink()
    with pytest.raises(ValueError, match="^a is missing in .*; again$"):
        check_files(tmp_path, hashes, "again")


def test_kept_mixers_and_scores_of_select(tmp_path):
    student = convert_model(tiny_teacher("llama", layers=2), "gka")
    file = mixer_file(tmp_path, "gka")
    write_mixers(student, file, {"seed": 1})
    content = file.read_bytes()
    start = int.from_bytes(content[:8], "little") + 8
    for place in (start, (start + len(content)) // 2, len(content) - 1):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(
            ValueError, match="gka.safetensors' is corrupt; remove this file and run memmix select again"
        ):
            load_mixers(student, tmp_path)
    file.write_bytes(content.replace(b"seed", b"sead"))
    with pytest.raises(ValueError, match="content does not match its hash"):
        read_metadata(file)
    scores, measured = tmp_path / "gka.json", []

    def measure():
        measured.append(1)
        return {"layers": [0.25]}

    for _ in range(2):
        assert saved_scores(scores, {"seed": 1}, measure) == {"layers": [0.25]}
    assert len(measured) == 1
    scores.write_text(scores.read_text().replace("0.25", "0.75"))
    assert saved_scores(scores, {"seed": 1}, measure) == {"layers": [0.25]} and len(measured) == 2


def test_the_converted_student_of_an_interrupted_run(tmp_path):
    teacher, run = tmp_path / "teacher", tmp_path / "run"
    tiny_teacher("llama", layers=2).save_pretrained(teacher)
    plan = {"mixer": "gka", "keep": [0], "num_layers": 2}
    write_plan(plan, tmp_path / "plan.json")
    student = planned_student(teacher, tmp_path / "plan.json", run)
    assert planned_student(teacher, tmp_path / "plan.json", run, resume=True) == student
    for file in (student / "model.safetensors", student / "config.json", run / "start.json"):
        content = file.read_bytes()
        for changed in (content[:-20] + bytes([content[-20] ^ 1]) + content[-19:], content[:-2]):
            file.write_bytes(changed)
            with pytest.raises(ValueError, match=f"{file.name}.*; start again with --no-resume$"):
                planned_student(teacher, tmp_path / "plan.json", run, resume=True)
        file.write_bytes(content)
    shutil.rmtree(student)
    with pytest.raises(ValueError, match="is missing in"):
        planned_student(teacher, tmp_path / "plan.json", run, resume=True)
    (run / "start.json").unlink()  # a kill before it was written: converted again
    assert planned_student(teacher, tmp_path / "plan.json", run, resume=True).is_dir()
