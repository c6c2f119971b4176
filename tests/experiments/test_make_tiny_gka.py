"""The recipe of the bundled student, in miniature: it must end with a loadable folder and its metrics."""

import json
from types import SimpleNamespace

import torch
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import load_model
from hf_memmix.conversion.records import commit
from hf_memmix.training.experiments.bundled import make_tiny_gka
from tiny_teachers import tiny_teacher


def test_drills_choose_the_kept_layer_beside_as_many_blocks_of_text():
    stream, drills = torch.arange(25_000), -torch.arange(1, 1 + 5 * 4096)
    text = stream[: 4 * 4096]  # the whole blocks of the first 20,000 tokens

    def scored(drill_blocks):
        data = make_tiny_gka.TokenBlocks(torch.cat([stream[: 2 * 4096], drills[: drill_blocks * 4096]]), 4096)
        return make_tiny_gka.scored_tokens(stream, data, SimpleNamespace(block_size=4096, drill_blocks=drill_blocks))

    assert torch.equal(scored(0), text)
    assert torch.equal(scored(1), torch.cat([text, drills[:4096]]))
    assert torch.equal(scored(5), torch.cat([text, drills[4096 : 5 * 4096]]))  # the last four of five


def test_recipe_in_miniature(tmp_path, monkeypatch):
    """Of a teacher with drills, whose recall is measured."""
    teacher, text = tmp_path / "teacher", tmp_path / "text.txt"
    tiny_teacher("llama", layers=2, vocab_size=4096, max_position_embeddings=128).save_pretrained(teacher)
    AutoTokenizer.from_pretrained(asset_path("tiny_teacher")).save_pretrained(teacher)
    monkeypatch.setattr(make_tiny_gka, "TEACHER", teacher)
    monkeypatch.setattr(make_tiny_gka, "DEV_TOKENS", 500)
    for name in ("DEV_TEXT", "HELDOUT_TEXT"):
        path = tmp_path / name
        path.write_text(getattr(make_tiny_gka, name).read_text("utf-8")[:60_000], "utf-8")
        monkeypatch.setattr(make_tiny_gka, name, path)
    text.write_text(asset_path("train.txt").read_text("utf-8")[:60_000], "utf-8")
    sizes = {"minutes": 0.01, "block_size": 96, "batch_size": 2, "drill_blocks": 4}
    make_tiny_gka.main(tmp_path / "out", "auto", [text], **sizes)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    student = load_model(tmp_path / "out")
    assert student.config.mixer_types.count("attention") == len(metrics["keep"]) == 1
    assert metrics["arguments"]["keep"] == "auto" and metrics["arguments"]["block_size"] == "96"
    assert metrics["keep"] == [max(range(2), key=metrics["layer_kl"].__getitem__)]
    assert {"ppl_ratio", "top1_agreement", "layer_error"} <= metrics["heldout"].keys()
    assert [stage["stage"] for stage in metrics["stages"]] == ["align", "distill"]
    assert metrics["commit"] == commit()
    for words in ("words", "unseen"):
        rows = metrics["recall"][words]
        assert [row["task"] for row in rows] == ["niah", "mqar", "kv", "variables"]
        assert all(row["length"] == 128 and {"teacher", "student"} <= row.keys() for row in rows)
