"""The old name of `hf_memmix.training.documents.readme_tables`."""

import warnings

import typer

from hf_memmix.training.documents.readme_tables import documents, main, render

__all__ = ["documents", "main", "render"]

warnings.warn(
    "hf_memmix.training.readme_tables is now hf_memmix.training.documents.readme_tables", FutureWarning, stacklevel=2
)

if __name__ == "__main__":
    typer.run(main)
