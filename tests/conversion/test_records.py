"""What measurements share: files that appear whole, tables, sizes, and where a figure was measured."""

import json

import pytest
import torch
import transformers

from hf_memmix.conversion import records


def test_a_file_is_replaced_atomically(tmp_path, monkeypatch):
    path = tmp_path / "new" / "results.json"
    records.write_json(path, {"rows": [1]})
    assert path.read_text() == '{\n "rows": [\n  1\n ]\n}\n'
    with pytest.raises(TypeError):
        records.write_json(path, {"rows": object()})

    def full_disk(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(records.os, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        records.write_json(path, {"rows": [2]})
    assert json.loads(path.read_text()) == {"rows": [1]}
    assert [file.name for file in path.parent.iterdir()] == ["results.json"], "nothing is left beside it"


def test_tables():
    rows = [("a", 1), ("b", 2.5)]
    assert records.markdown_table(("name", "n"), rows) == "| name | n |\n| --- | --- |\n| a | 1 |\n| b | 2.5 |"
    assert records.markdown_table(("name", "n"), rows, figures=True).splitlines()[1] == "| --- | ---: |"


def test_sizes():
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 200 * 1024: "200 KiB", 2**21: "2.0 MiB", 3 * 2**30: "3.0 GiB"}
    for count, text in (sizes | {2000 * 2**30: "2,000.0 GiB"}).items():
        assert records.bytes_text(count) == text


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_COMMIT", "abc1234")
    found = records.environment("cpu")
    assert found["commit"] == "abc1234" and found["hardware"].endswith(" cores")
    assert (found["torch"], found["transformers"]) == (torch.__version__, transformers.__version__)
    monkeypatch.delenv("HF_MEMMIX_COMMIT")
    monkeypatch.setattr(records, "CHECKOUT", tmp_path)
    assert records.commit() == "unknown", "an installed wheel does not name the commit of a repository around it"
