"""Results name the bundled transformer that they are of, and stay true if another one is bundled."""

import json

import pytest

from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.experiments.bundled import versions


def test_the_card_names_the_bundled_weights():
    record = json.loads((CHECKOUT / "model_cards" / "tiny_teacher" / "metrics.json").read_text())
    assert record["assets"]["tiny_teacher/model.safetensors"]["sha256"] == versions.bundled_teacher()["sha256"]


def test_rows_of_two_transformers_are_not_mixed(tmp_path):
    path, about = tmp_path / "results.json", {"teacher": {"sha256": "1" * 64}}
    versions.check_teacher(path, about)
    path.write_text(json.dumps({"rows": []}))
    versions.check_teacher(path, {"teacher": {"sha256": versions.FIRST}})
    versions.check_teacher(path, {})
    with pytest.raises(ValueError, match="choose another --out"):
        versions.check_teacher(path, about)
