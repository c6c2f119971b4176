"""YAML of users: recipes and options."""

import itertools

import pytest
import yaml

from hf_memmix.conversion.yaml_text import DEEPEST, LARGEST, read_yaml
from hf_memmix.training.recipe import load_recipe

LINES = [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in itertools.pairwise("abcdefghi")]
BOMB = "\n".join(["a: &a [1, 2]", *LINES])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, f"its aliases stand for more than {LARGEST:,} values"),
        ("[" * 3000 + "]" * 3000, f"nested more than {DEEPEST} levels"),
        ("a: &a [*a]", "holds itself"),
        ("a: 1\na: 2", "a stands in line 1 and in line 2"),
        ("2024-13-45", "month must be in 1..12"),
        ("[1, 2", "expected"),
    ],
)
def test_what_would_be_misread_or_never_end_is_refused(text, message, tmp_path):
    with pytest.raises(yaml.YAMLError, match=message):
        read_yaml(text)
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match="is not valid YAML") as refused:
        load_recipe(tmp_path / "recipe.yaml")
    assert len(str(refused.value)) < 2200


def test_aliases_and_merge_keys_are_read():
    assert read_yaml("x: &x {b: 1, c: [1, 2]}\ny:\n  <<: *x\n  b: 2")["y"] == {"b": 2, "c": [1, 2]}
    assert read_yaml("[12, 10]") == [12, 10] and read_yaml("") is None
