"""The old name of `hf_memmix.training.bundled.demo`."""

import warnings

import typer

from hf_memmix.training.bundled.demo import main, run_demo

__all__ = ["main", "run_demo"]

warnings.warn("hf_memmix.training.demo is now hf_memmix.training.bundled.demo", FutureWarning, stacklevel=2)

if __name__ == "__main__":
    typer.run(main)
