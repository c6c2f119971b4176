"""Figures in the pages of the product are those of model_cards/figures.json."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WRITER = runpy.run_path(str(ROOT / "model_cards" / "figures.py"))
FIGURES = json.loads(WRITER["FILE"].read_text(encoding="utf-8"))
PAGES = WRITER["pages"]()
render = WRITER["render"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_table_and_number_of_a_page_is_that_of_the_file(path):
    text = path.read_text(encoding="utf-8")
    assert render(text, FIGURES) == text, "run python model_cards/figures.py"


def test_the_file_has_nothing_that_no_page_shows():
    shown = [WRITER["names"](path.read_text(encoding="utf-8")) for path in PAGES]
    for i, kind in enumerate(("tables", "numbers")):
        assert set(FIGURES[kind]) == {name for names in shown for name in names[i]}, (
            "run python -m hf_memmix.training.experiments.figures"
        )


def test_every_number_is_a_number_with_a_file():
    for name, number in FIGURES["numbers"].items():
        assert WRITER["NUMBER"].fullmatch(f"<!--= {name} -->{number['text']}"), name
        assert (ROOT / number["source"]).is_file(), name


def test_a_page_with_another_figure_is_found():
    table = {"head": ["a", "b"], "right": True, "rows": [["x", "1"]]}
    figures = {"tables": {"tea": [table, "Measured."]}, "numbers": {"cups": {"text": "1,234.5"}}}
    page = (
        "<!-- begin tea -->\n| a | b |\n| --- | ---: |\n| x | 1 |\n\nMeasured.\n<!-- end tea -->\n"
        "<!--= cups -->1,234.5, or <!--= cups -->1,234.5.\n"
    )
    assert render(page, figures) == page
    assert render(page.replace("x | 1", "x | 2").replace("Measured.", ""), figures) == page
    assert render(page.replace("1,234.5", "-7"), figures) == render(page.replace("1,234.5", ""), figures) == page


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- begin tea -->\n", "its begin mark and its end mark once"),
        ("<!-- end tea -->\n", "its begin mark and its end mark once"),
        ("<!-- begin tea -->\n<!-- begin tea -->\n<!-- end tea -->\n", "its begin mark and its end mark once"),
        ("<!-- begin tea -->\n<!-- end tea -->\n", '"tables" of figures.json have no tea'),
        ("<!--= cups -->3\n", '"numbers" of figures.json have no cups'),
    ],
)
def test_a_mark_without_a_figure_is_refused(page, message):
    with pytest.raises(ValueError, match=message):
        render(page, {"tables": {}, "numbers": {}})
