"""The student of a plan of `memmix select`, converted piece by piece into a folder of the run."""

import json
from functools import partial
from pathlib import Path

from hf_memmix.conversion.convert import convert_model, convert_to_folder
from hf_memmix.conversion.hashes import check_files, file_hash, hash_files, read_sealed, write_sealed
from hf_memmix.conversion.layer_plan import plan_arguments, read_plan, trained_folder
from hf_memmix.conversion.loading import read_config
from hf_memmix.conversion.mixer_files import load_aligned
from hf_memmix.conversion.saving import remove_folder
from hf_memmix.errors import UserError

NAME, RECORD = "start", "start.json"
START_AGAIN = "start again with --no-resume"


def planned_student(teacher: Path, plan: str | Path, folder: Path, resume: bool = False) -> Path:
    """The folder of the student in `folder`.

    resume: take the student that an interrupted run has left there.

    Raises:
        ValueError: the plan does not fit the teacher, or it, or a file of the student, has changed since the
            interrupted run began.
    """
    planned = read_plan(plan, read_config(teacher).num_hidden_layers)
    aligned, arguments = trained_folder(planned, plan), plan_arguments(planned)
    mixers = {} if aligned is None else {file.name: file_hash(file) for file in aligned.glob("*.safetensors")}
    record, student = {"plan": arguments, "mixers": mixers}, folder / NAME
    if resume and (folder / RECORD).is_file():
        known = read_sealed(folder / RECORD, START_AGAIN)
        files = known.pop("files")
        if known != json.loads(json.dumps(record)):
            raise UserError(
                f"{str(folder)!r} belongs to a run with another plan than {str(plan)!r}; give that plan, start again"
                " with --no-resume, or give another output folder"
            )
        check_files(student, files, START_AGAIN)
        return student
    folder.mkdir(parents=True, exist_ok=True)
    remove_folder(student, beside=student)
    fill = None if aligned is None else partial(load_aligned, folder=aligned)
    convert_to_folder(teacher, student, partial(convert_model, **arguments), fill=fill)
    write_sealed(folder / RECORD, record | {"files": hash_files(student)})
    return student
