"""The environment of all tests: offline, one thread per process, and Triton's interpreter if there is no GPU."""

import gc
import os
import re
import sys

import pytest

gc.disable()  # until the tests are collected: what is imported and collected stays, so a search finds no garbage
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config):
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # with -n, the process that starts the others runs no test and needs no PyTorch
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # set before the first `import triton`: without a GPU they run in the interpreter, with one they are compiled
    if not torch.cuda.is_available():
        if "TRITON_INTERPRET" not in os.environ and "triton" in sys.modules:
            raise pytest.UsageError("a conftest.py imports triton; import what needs it inside of a fixture")
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if not torch.accelerator.is_available():
        # torch.manual_seed formats and keeps the stack for each kind of accelerator that could still be initialised:
        # milliseconds per call within pytest, several times per test
        for kind in (torch.cuda, torch.mtia, torch.xpu):
            kind.manual_seed_all = lambda seed: None


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marker
def pytest_collection_modifyitems(items):
    for item in items:
        patterns = [pattern for mark in item.iter_markers("product_rows") for pattern in mark.args]
        if any(re.match(pattern, f"{item.callspec.id}]") for pattern in patterns):
            item.add_marker(pytest.mark.product)
    import torch

    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords have the names of folders, too
            item.add_marker(no_gpu)


def pytest_collection_finish():
    """The objects of the imported libraries stay to the end: the garbage collector need not look at them again."""
    gc.freeze()
    gc.set_threshold(10_000)  # objects; with 700, the default, up to a tenth of the time of a test goes into searches
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def searched_once():
    """What the tests of a module leave stays to the end, too: cached models, and what torch.compile remembers.
    Otherwise each gc.collect() of torch.compile or of a trainer would search all that was made since the first test.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="module")
def probes():
    """What probes of recall are made from, of the bundled transformer's tokenizer."""
    from transformers import AutoTokenizer

    from hf_memmix.assets import asset_path
    from hf_memmix.training.evaluation.probes import Material

    text = asset_path("heldout.txt").read_text(encoding="utf-8")[:60_000]
    return Material(AutoTokenizer.from_pretrained(asset_path("tiny_teacher")), text)


@pytest.fixture(scope="module")
def material(probes):
    """What drills of recall are made from."""
    from hf_memmix.assets import asset_path
    from hf_memmix.training.data import tokenize_files
    from hf_memmix.training.drills import DrillMaterial

    return DrillMaterial(probes.tokenizer, tokenize_files(asset_path("dev.txt"), probes.tokenizer).numpy(), probes)
