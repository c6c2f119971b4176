"""Makes the folder of a teacher that `teacher.py --keep` wrote into one file (kept_weights.py).

python training/experiments/recall_teacher/unpack_teacher.py --file teacher.bin --out .scratch/teacher
"""

from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.training.experiments.recall_teacher.kept_weights import unpack


def main(
    file: Annotated[Path, typer.Option(help="file of teacher.py --keep")],
    out: Annotated[Path, typer.Option(help="folder for the teacher")],
) -> None:
    """Make the teacher's folder again."""
    unpack(file, out)
    print(f"teacher in {out}")


if __name__ == "__main__":
    typer.run(main)
