"""One reader of layer choices for commands, recipes, plans and Python."""

import json
import re
import time

import pytest

from hf_memmix.conversion import LayerChoice, layers_to_keep
from hf_memmix.conversion.layer_plan import read_plan
from hf_memmix.training.recipe import Recipe


def test_layers_by_index():
    cases = {"2": [2], "0-3,8": [0, 1, 2, 3, 8], " 8 , 1 - 2": [1, 2, 8], "5-5": [5], "none": [], "08": [8]}
    for text, layers in cases.items():
        choice = LayerChoice.listed(text, "--keep-layers")
        assert choice.layers(9) == layers and choice.number(9) == len(layers)
        assert layers_to_keep(text, 9) == layers_to_keep(choice, 9) == layers


def test_layers_by_count():
    for text, layers in {"2": [2, 6], "0.25": [2, 6], "1": [4], "8": list(range(8)), "0.01": [4]}.items():
        choice = LayerChoice.counted(text, "--keep-count")
        assert choice.layers(8) == layers and choice.number(8) == len(layers)


def test_errors_name_option_value_and_remedy():
    for text in ("", "x", "3-1", "-1", "1-", "1,,2", "0.5", "1;2", "1 2", "1-2-3", "²", "9" * 30):
        with pytest.raises(ValueError, match=f'--keep-layers is {re.escape(repr(text))}.*e.g. "0-3,8"'):
            LayerChoice.listed(text, "--keep-layers")
    for text in ("", "x", "0", "-2", "0.0", "1.0", "1.5", "nan.", "inf", "-0.5", "1,2"):
        with pytest.raises(ValueError, match="--keep-count is .*; give a number of layers"):
            LayerChoice.counted(text, "--keep-count")


def test_what_is_no_choice_is_refused():
    """An iterator would be empty when its layers are asked for again."""
    for keep in (True, 1, 1.5, None, object(), [True], ["1"], (layer for layer in [1]), iter([1])):
        with pytest.raises(ValueError, match=r"keep is .*; give a list of layer indices"):
            layers_to_keep(keep, 4)
    for keep in ([1], (1,), {1}, range(1, 2), 0.25):
        assert len(layers_to_keep(keep, 4)) == 1


def test_missing_layers_and_repeated_layers_are_refused():
    for text, message in (("2-4", "names layers 2-4, but there are layers 0 to 3"), ("1,0-2", "names layer 1 twice")):
        with pytest.raises(ValueError, match=message):
            LayerChoice.listed(text).layers(4)
    with pytest.raises(ValueError, match="'5', but there are 4 layers"):
        LayerChoice.counted("5").layers(4)


def test_huge_ranges_are_refused_before_they_are_built(tmp_path):
    text, plan = "0-999999999999", tmp_path / "plan.json"
    plan.write_text(json.dumps({"mixer": "gka", "keep": [999999999999], "num_layers": 4}))
    start = time.perf_counter()
    for refused in (
        lambda: LayerChoice.listed(text).layers(4),
        lambda: layers_to_keep(text, 4),
        lambda: read_plan(plan, 4),
        lambda: Recipe(layers="5-999999999999").layer_slice([0, 1, 2, 3], 4),
    ):
        with pytest.raises(ValueError, match="999999999999"):
            refused()
    assert time.perf_counter() - start < 5  # building the list would take hours and all memory
