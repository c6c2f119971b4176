"""The commands that make a student: `memmix convert` from a transformer, `memmix import-hmf` from a GKA release."""

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.shell import Json, Overwrite, err, friendly, out, print_json


@friendly
def import_hmf(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint in the official GKA release's format.")],
    out_dir: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the model.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Load a checkpoint of the official GKA release (Hybrid Model Factory) and save it as a model of this package."""
    from dataclasses import asdict

    from hf_memmix.conversion import hmf, save_student
    from hf_memmix.conversion.saving import check_target

    check_target(out_dir, overwrite)
    with err.status("importing"):
        model = hmf.import_hmf(folder)
        record = asdict(model.import_report)
        files = {"conversion.json": json.dumps(record, indent=1) + "\n"} | hmf.tokenizer_files(folder)
        save_student(model, out_dir, overwrite=overwrite, files=files)
    if as_json:
        print_json(record | {"out": str(out_dir)})
        return
    kinds = record["layers"]
    out.print(f"{record['backbone']}: {kinds.count('gka')} GKA layers, {kinds.count('attention')} of attention")
    out.print(f"{record['copied']} tensors copied, {len(record['dropped'])} dropped")
    for row in record["dropped"]:
        out.print(f"  {row['source']}: {row['reason']}", highlight=False)
    out.print(f"written to {out_dir}")
