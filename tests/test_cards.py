"""Model cards: metadata parse, and the numbers are those of the recorded run and of the shipped files."""

import hashlib
import json
import runpy
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_memmix.assets import asset_path

CARDS = Path(__file__).parents[1] / "model_cards"
TEXTS = ("train.txt", "dev.txt", "heldout.txt")
LIMIT = {"tiny_teacher": 12_000_000, "tiny_gka": 12_000_000} | dict.fromkeys(TEXTS, 1_000_000)


@pytest.fixture(scope="module")
def metrics():
    return json.loads((CARDS / "tiny_teacher" / "metrics.json").read_text())


@pytest.fixture(scope="module")
def card():
    return ModelCard.load(CARDS / "tiny_teacher" / "README.md")


def test_metadata_name_the_task_and_the_measured_perplexity(card, metrics):
    assert card.data.license and card.data.language and card.data.library_name == "transformers"
    values = {r.metric_type: r.metric_value for r in card.data.eval_results}
    heldout = metrics["heldout"]
    assert values == {"perplexity": heldout["perplexity"], "bits_per_byte": heldout["bits_per_byte"]}
    assert "[More Information Needed]" not in card.content


def test_shipped_files_are_the_recorded_ones_and_within_their_limits(metrics):
    for name, recorded in metrics["assets"].items():
        content = asset_path(name).read_bytes()
        assert (name, hashlib.sha256(content).hexdigest()) == (name, recorded["sha256"])
    for name, limit in LIMIT.items():
        path = asset_path(name)
        files = path.rglob("*") if path.is_dir() else [path]
        assert sum(f.stat().st_size for f in files) <= limit


def test_texts_share_no_document():
    texts = [asset_path(name).read_text(encoding="utf-8").split("\n<|endoftext|>\n") for name in TEXTS]
    documents = [{document.strip() for document in text if document.strip()} for text in texts]
    assert [len(text) for text in documents] == [200, 109, 65]
    assert len(set.union(*documents)) == 374


def figures_and_their_text():
    """(file, key of the figures in it, text): reports use the held-out text, choices use the dev text."""
    for path in sorted(CARDS.glob("*/metrics*.json")):
        yield path, "heldout", "heldout.txt"
        if "untrained" in json.loads(path.read_text()):
            yield path, "untrained", "dev.txt"


@pytest.mark.parametrize(
    ("path", "key", "text"), list(figures_and_their_text()), ids=lambda value: getattr(value, "stem", value)
)
def test_figures_are_of_the_shipped_text(path, key, text):
    record = json.loads(path.read_text())[key]
    expected = {"file": text, "sha256": hashlib.sha256(asset_path(text).read_bytes()).hexdigest()}
    assert {name: record["text"][name] for name in expected} == expected


@pytest.mark.product  # a whole command; its parts have tests
def test_cards_of_students_are_their_measurements():
    runpy.run_path(str(CARDS / "build.py"))["main"](check=True)  # exits with a message if a card is out of date


def test_bundled_student_is_within_the_promised_ratio():
    runs = [json.loads((CARDS / "tiny_gka" / name).read_text()) for name in ("metrics.json", "metrics_pure.json")]
    assert [len(run["heldout"]["layer_error"]) for run in runs] == [5, 6]
    assert runs[0]["heldout"]["ppl_ratio"] <= 1.05
    assert runs[1]["heldout"]["ppl_ratio"] <= 1.15
