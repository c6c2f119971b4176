"""The recipe of the bundled student, in miniature: it must end with a loadable folder and its metrics."""

import json
from types import SimpleNamespace

import torch
import typer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_memmix.assets import asset_path
from hf_memmix.conversion import load_model
from hf_memmix.conversion.records import commit
from hf_memmix.training.experiments.bundled import make_tiny_gka
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer


def make(options):
    app = typer.Typer()
    app.command()(make_tiny_gka.main)
    command = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    return CliRunner().invoke(app, command, catch_exceptions=False)


def test_drills_choose_the_kept_layer_beside_as_many_blocks_of_text():
    stream, drills = torch.arange(25_000), -torch.arange(1, 1 + 5 * 4096)
    text = stream[: 4 * 4096]  # the whole blocks of the first 20,000 tokens

    def scored(drill_blocks):
        data = make_tiny_gka.TokenBlocks(torch.cat([stream[: 2 * 4096], drills[: drill_blocks * 4096]]), 4096)
        return make_tiny_gka.scored_tokens(stream, data, SimpleNamespace(block_size=4096, drill_blocks=drill_blocks))

    assert torch.equal(scored(0), text)
    assert torch.equal(scored(1), torch.cat([text, drills[:4096]]))
    assert torch.equal(scored(5), torch.cat([text, drills[4096 : 5 * 4096]]))  # the last four of five


def test_recipe_in_miniature(tmp_path):
    tiny_teacher("llama", layers=2).save_pretrained(tmp_path / "teacher")
    tiny_tokenizer().save_pretrained(tmp_path / "teacher")
    for name, words in (("text", 600), ("dev", 100), ("heldout", 120)):
        (tmp_path / f"{name}.txt").write_text(tiny_text(words))
    sizes = {"keep": "auto", "minutes": 0.01, "block-size": 16, "batch-size": 2, "sampled-blocks": 3}
    files = {name: tmp_path / f"{name}.txt" for name in ("text", "dev", "heldout")}
    files |= {"teacher": tmp_path / "teacher", "out": tmp_path / "out"}
    result = make(sizes | files)
    assert result.exit_code == 0, result.output
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    student = load_model(tmp_path / "out")
    assert student.config.mixer_types.count("attention") == len(metrics["keep"]) == 1
    assert metrics["arguments"]["keep"] == "auto" and metrics["arguments"]["block_size"] == "16"
    assert metrics["keep"] == [max(range(2), key=metrics["layer_kl"].__getitem__)]
    assert {"ppl_ratio", "top1_agreement", "layer_error"} <= metrics["heldout"].keys()
    assert [metrics[key]["text"]["file"] for key in ("untrained", "heldout")] == ["dev.txt", "heldout.txt"]
    assert [stage["stage"] for stage in metrics["stages"]] == ["align", "distill"]
    assert metrics["commit"] == commit()


def test_a_student_of_drills_is_measured_beside_its_teacher(tmp_path):
    tiny_teacher("llama", layers=2, vocab_size=4096, max_position_embeddings=128).save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(asset_path("tiny_teacher")).save_pretrained(tmp_path / "teacher")
    sizes = {
        "keep": "auto",
        "minutes": 0.01,
        "block-size": 96,
        "batch-size": 2,
        "sampled-blocks": 0,
        "drill-blocks": 4,
    }
    files = {name: tmp_path / f"{name}.txt" for name in ("text", "dev", "heldout")}
    for name, path in files.items():
        path.write_text(
            asset_path("train.txt" if name == "text" else f"{name}.txt").read_text("utf-8")[:60_000], "utf-8"
        )
    result = make(sizes | files | {"teacher": tmp_path / "teacher", "out": tmp_path / "out"})
    assert result.exit_code == 0, result.output
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert "4 blocks of drills" in result.output
    for words in ("words", "unseen"):
        rows = metrics["recall"][words]
        assert [row["task"] for row in rows] == ["niah", "mqar", "kv", "variables"]
        assert all(row["length"] == 128 and {"teacher", "student"} <= row.keys() for row in rows)
