"""CONTRIBUTING.md names files and tables that exist, and every mixer has the rows that "Add a mixer" asks for."""

import re
from pathlib import Path

import pytest

from hf_memmix.mixers import MIXERS
from testing import MIXERS as ROWS

ROOT = Path(__file__).parents[1]
TEXT = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
TOP = "hf_memmix|kernels|conversion|training|tests"
OWN = [name for name, mixer in MIXERS.items() if mixer.__module__.startswith("hf_memmix.mixers.")]
TABLES = {
    "MIXERS in tests/testing.py": ROWS,
}


def test_files_exist():
    named = set(re.findall(rf"(?<![\w/.])(?:{TOP})/[\w./-]*\w", TEXT))
    named = {path for path in named if not re.search(r"NAME|OP|<", path)}
    assert {"tests/testing.py", "hf_memmix/mixers/base.py", "conversion/from_attention/projections.py"} <= named
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]


def test_names_are_those_of_their_files():
    """`NAME` in `FILE`: the file defines NAME at its top level."""
    named = re.findall(r"`([A-Za-z_]+)` in `([\w/.-]+\.py)`", TEXT)
    assert len(named) >= 8
    for name, path in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(?:def |class )?{name}\b", source, flags=re.MULTILINE), f"{path} does not define {name}"


@pytest.mark.parametrize("table", TABLES)
def test_every_mixer_has_its_rows(table):
    missing = set(OWN) - set(TABLES[table])
    assert not missing, f"write a row of {', '.join(sorted(missing))} in {table}: CONTRIBUTING.md, 'Add a mixer'"


@pytest.mark.parametrize("name", OWN)
def test_every_mixer_says_what_a_card_and_a_plan_need(name):
    mixer = MIXERS[name]
    assert mixer.summary and not mixer.summary.endswith("."), "one sentence with the paper, without its full stop"
    assert mixer.kept_bytes is not None, "measured as tests/training/test_planning.py compares it"


def test_every_mixer_is_in_the_table_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [name for name in OWN if not re.search(rf"^\|[^|]*`{name}`", readme, re.MULTILINE)]
    assert not missing, f"write a row of {', '.join(missing)} in the table of mixers in README.md"
