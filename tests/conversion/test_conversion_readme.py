"""conversion/README.md: its snippets run, its links lead somewhere. tests/test_readme.py checks its tables."""

import re
import subprocess
import sys
from pathlib import Path

from hf_memmix.training.documents.readme_tables import documents

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "conversion" / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_snippets_run_one_after_the_other(tmp_path):
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL))
    assert "convert_model" in code
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "student" / "conversion.json").exists()


def test_links_of_the_readme_exist():
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert targets and not [target for target in targets if not (PAGE.parent / target).exists()]


def test_the_tables_are_written_from_the_table_of_families():
    assert PAGE in documents(ROOT)
    assert "<!-- begin teachers -->" in TEXT and "<!-- begin refusals -->" in TEXT
    assert "<!-- begin teachers -->" not in (ROOT / "README.md").read_text(encoding="utf-8")
