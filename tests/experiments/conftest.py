"""What several experiments' tests train on."""

import numpy
import pytest
import torch


@pytest.fixture
def easy_text(tmp_path, monkeypatch):
    """The file of a stream that is short and easy, as an array; dev and held-out text are its continuation."""
    # not at the top: pytest may import this file before tests/conftest.py has switched Triton's interpreter on
    from hf_memmix.training.experiments.common import fit
    from hf_memmix.training.experiments.common.text import train_tokens

    path = tmp_path / "text.npy"
    numpy.save(path, (numpy.arange(2000) % 50).astype(numpy.uint16))
    monkeypatch.setattr(fit, "measured_tokens", lambda name: torch.arange(200) % 50)
    train_tokens.cache_clear()
    return path
