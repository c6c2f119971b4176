"""The pages of the product: their links lead somewhere, and their commands and options exist."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer

from hf_memmix.commands import app

ROOT = Path(__file__).parents[1]
PAGES = [*runpy.run_path(str(ROOT / "model_cards" / "figures.py"))["pages"](), ROOT / "CONTRIBUTING.md"]
TOP = "hf_memmix|kernels|conversion|training|tests|model_cards"
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_links_and_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if not target.startswith(("http", "mailto"))]
    missing = [target for target in targets if not (page.parent / target).exists()]
    paths = re.findall(rf"`((?:{TOP})/[\w./-]+\w)`", text)
    paths = [path for path in paths if not re.search(r"NAME|OP", path)]
    missing += [path for path in paths if not (ROOT / path).exists() and not (page.parent / path).exists()]
    assert not missing


@every_page
def test_commands_have_these_options(page):
    known = typer.main.get_command(app).commands
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line, comments=True) or [""]
            if program != "memmix":
                continue
            assert words[0] in known, line
            options = {option: one for one in known[words[0]].params for option in one.opts + one.secondary_opts}
            given = [word.split("=")[0] for word in words if word.startswith("-")]
            if not known[words[0]].context_settings.get("ignore_unknown_options"):  # `memmix serve` hands them on
                assert set(given) <= set(options), line
            required = {one.name for one in known[words[0]].params if one.required}
            arguments = {one.name for one in known[words[0]].params if one.param_type_name == "argument"}
            assert required - arguments <= {options[word].name for word in given if word in options}, line
