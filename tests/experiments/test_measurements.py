"""Every committed result is in the one table of measurements, and every entry is a committed file."""

import json

import pytest

from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.experiments.measurements import MEASUREMENTS, path_of, read


def test_all_results_are_listed_once():
    listed = [CHECKOUT / path for path in MEASUREMENTS.values()]
    assert len(set(listed)) == len(listed)
    found = set(CHECKOUT.glob("training/**/results/*.json"))
    assert found and found == {path for path in listed if (CHECKOUT / "training") in path.parents}
    assert all(path.is_file() for path in listed)


def test_reading_and_mistakes(tmp_path):
    assert read("recall") == json.loads(path_of("recall").read_text())
    with pytest.raises(ValueError, match="no measurement 'tea'; choose from demo"):
        path_of("tea")
    with pytest.raises(ValueError, match="does not exist; run this in a checkout"):
        path_of("demo", tmp_path)
