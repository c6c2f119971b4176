"""Results name the bundled transformer that they are of, and stay true if another one is bundled."""

import json

import pytest

from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.experiments.bundled import versions
from hf_memmix.training.experiments.results import read

# files and the least number of their tables that are of the bundled transformer


def test_the_card_names_the_bundled_weights():
    record = json.loads((CHECKOUT / "model_cards" / "tiny_teacher" / "metrics.json").read_text())
    assert record["assets"]["tiny_teacher/model.safetensors"]["sha256"] == versions.bundled_teacher()["sha256"]


def test_no_caption_has_a_note_while_the_results_are_of_the_bundled_transformer():
    assert not versions.earlier_teacher({"teacher": versions.bundled_teacher()})
    if versions.bundled_teacher()["sha256"] == versions.FIRST:
        assert not versions.earlier_teacher(read("conversion_table"))


def test_rows_of_two_transformers_are_not_mixed(tmp_path):
    path, about = tmp_path / "results.json", {"teacher": {"sha256": "1" * 64}}
    versions.check_teacher(path, about)
    path.write_text(json.dumps({"rows": []}))
    versions.check_teacher(path, {"teacher": {"sha256": versions.FIRST}})
    versions.check_teacher(path, {})
    with pytest.raises(ValueError, match="choose another --out"):
        versions.check_teacher(path, about)
