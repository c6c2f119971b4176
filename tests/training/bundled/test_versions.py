"""Results name the bundled transformer that they are of, and stay true if another one is bundled."""

import json
from pathlib import Path

import pytest

from hf_memmix.training.bundled import versions
from hf_memmix.training.documents.measurements import CARDS, read
from hf_memmix.training.documents.readme_tables import documents, render

ROOT = Path(__file__).parents[3]
# files and the least number of their tables that are of the bundled transformer
DOCUMENTS = {
    "README.md": 2,  # demo, students
    "training/README.md": 3,  # quantized, small_states, one_gpu
    "training/bundled/README.md": 1,  # bundled_recall
    "training/convert_your_model.md": 1,
    "training/experiments/conversion/README.md": 4,
    "training/experiments/mixtures/README.md": 1,
    "training/experiments/several_gpus/README.md": 1,
}


def test_the_card_names_the_bundled_weights():
    record = json.loads((ROOT / CARDS / "tiny_teacher" / "metrics.json").read_text())
    assert record["assets"]["tiny_teacher/model.safetensors"]["sha256"] == versions.bundled_teacher()["sha256"]


def test_no_caption_has_a_note_while_the_results_are_of_the_bundled_transformer():
    assert not versions.earlier_teacher({"teacher": versions.bundled_teacher()})
    if versions.bundled_teacher()["sha256"] == versions.FIRST:
        assert not versions.earlier_teacher(read("conversion_table", ROOT))


def test_captions_name_an_earlier_transformer_once_another_one_is_bundled(monkeypatch):
    monkeypatch.setattr(versions, "bundled_teacher", lambda: {"sha256": "0" * 64})
    found = {}
    for path in documents(ROOT):
        text = render(path.read_text(encoding="utf-8"), ROOT)
        if count := text.count("an earlier bundled transformer, sha256"):
            found[str(path.relative_to(ROOT))] = count
    assert {name: min(count, found.get(name, 0)) for name, count in DOCUMENTS.items()} == DOCUMENTS


def test_rows_of_two_transformers_are_not_mixed(tmp_path):
    path, about = tmp_path / "results.json", {"teacher": {"sha256": "1" * 64}}
    versions.check_teacher(path, about)
    path.write_text(json.dumps({"rows": []}))
    versions.check_teacher(path, {"teacher": {"sha256": versions.FIRST}})
    versions.check_teacher(path, {})
    with pytest.raises(ValueError, match="choose another --out"):
        versions.check_teacher(path, about)
