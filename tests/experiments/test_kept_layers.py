"""The choices of kept layers that the experiment compares, and its table."""

from types import SimpleNamespace

import pytest

from hf_memmix.training.experiments.smollm2 import kept_layers
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    for write in (tiny_teacher(layers=3), tiny_tokenizer()):
        write.save_pretrained(folder / "teacher")
    (folder / "text.txt").write_text(tiny_text(300))
    texts = dict.fromkeys(("text", "heldout", "domain"), folder / "text.txt")
    sizes = {"length": 48, "lengths": [48], "samples": 2, "measured_tokens": 96, "window": 4, "sinks": 1}
    sizes |= {"choice_samples": 2, "choice_tokens": 96, "tasks": ["niah", "mqar"]}
    asked = {"rules": list(kept_layers.RULES), "counts": [1], "out": folder / "kept_layers.json"}
    args = SimpleNamespace(teacher=folder / "teacher", **texts, **sizes, **asked)
    return [row | kept_layers.run(row, args) for row in kept_layers.rows_to_run([], args)]


def test_every_rule_is_measured(rows):
    assert [row["rule"] for row in rows] == list(kept_layers.RULES) and rows[0]["keep"] == [1]
    assert all(len(row["keep"]) == 1 and row["student"]["text"]["kl"] > 0 for row in rows)
    assert {row["student"]["niah"]["teacher"]["48"]["answers"] for row in rows} == {10}


def cells_of(line):
    return line.strip("| ").split(" | ")


def test_the_table_has_a_row_for_each_choice(rows):
    settings, environment = {"lengths": [48], "window": 4}, {"hardware": "a", "commit": "b"}
    lines = kept_layers.table({"rows": rows, "settings": settings, "environment": environment}).splitlines()
    for row in rows:
        cells = next(cells for cells in map(cells_of, lines) if row["rule"] in cells[0].split("; "))
        assert cells[1:3] == [str(row["keep"][0]), f"{row['student']['text']['kl']:.4f}"]
