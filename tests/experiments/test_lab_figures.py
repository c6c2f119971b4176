"""figures.json, the tables of the experiments' pages and measured.json are what the committed results give."""

import hashlib
import re

import pytest

from hf_memmix.assets import asset_path
from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.experiments import figures
from hf_memmix.training.experiments.budget import collect
from hf_memmix.training.experiments.results import path_of, read
from hf_memmix.training.planning import speed


def test_no_file_would_change():
    stale = [path for path, content in figures.written().items() if path.read_text(encoding="utf-8") != content]
    assert not [str(path.relative_to(CHECKOUT)) for path in stale]


def test_blocks_hold_all_of_a_table():
    text = "A sentence.\n\n| a | b |\n| --- | ---: |\n| x |  |\n| y | 2 |\n\nMeasured."
    table = {"head": ["a", "b"], "right": True, "rows": [["x", ""], ["y", "2"]]}
    assert figures.blocks(text) == ["A sentence.", table, "Measured."]
    assert "\n\n".join(map(figures.PRODUCT["block"], figures.blocks(text))) == text


def test_an_unknown_table_is_refused():
    with pytest.raises(ValueError, match="no table 'tea'; choose from results"):
        figures.table("tea")


@pytest.mark.parametrize("name", figures.NUMBERS)
def test_numbers_are_numbers_of_their_files(name):
    found = figures.number(name)
    assert figures.PRODUCT["NUMBER"].fullmatch(f"<!--= {name} -->{found['text']}")
    assert (CHECKOUT / found["source"]).is_file()


def test_the_collected_measurements_are_those_of_the_committed_files():
    assert speed.measured() == collect.collect()


@pytest.mark.parametrize(
    ("name", "key", "text"),
    [("demo", None, "heldout.txt"), ("init_table", "dev", "dev.txt"), ("init_table", "heldout", "heldout.txt")],
)
def test_results_are_of_the_shipped_text(name, key, text):
    record = read(name) if key is None else read(name)[key]
    expected = {"file": text, "sha256": hashlib.sha256(asset_path(text).read_bytes()).hexdigest()}
    assert {name: record["text"][name] for name in expected} == expected


def test_results_are_found_by_the_names_of_their_files():
    assert path_of("recall") == CHECKOUT / "training/experiments/gka/results/recall.json"
    with pytest.raises(ValueError, match="no results 'tea'; choose from "):
        path_of("tea")


@pytest.mark.parametrize(
    "page", sorted((CHECKOUT / "training/experiments").rglob("*.md")), ids=lambda page: page.parent.name
)
def test_links_of_the_experiments_pages_exist(page):
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert not [target for target in targets if not target.startswith("http") and not (page.parent / target).exists()]
