"""The student of a plan of `memmix select`, converted piece by piece into a folder of the run."""

from functools import partial
from pathlib import Path

from hf_memmix.conversion.convert import convert_model, convert_to_folder
from hf_memmix.conversion.loading import read_config, read_json
from hf_memmix.conversion.mixer_files import load_aligned
from hf_memmix.conversion.plan import plan_arguments, read_plan, trained_folder
from hf_memmix.conversion.records import write_json
from hf_memmix.conversion.saving import remove_folder
from hf_memmix.training.hashes import file_hash

NAME, RECORD = "start", "start.json"


def planned_student(teacher: Path, plan: str | Path, folder: Path, resume: bool = False) -> Path:
    """The folder of the student in `folder`.

    resume: take the student that an interrupted run has left there.

    Raises:
        ValueError: the plan does not fit the teacher, or it has changed since the interrupted run began.
    """
    planned = read_plan(plan, read_config(teacher).num_hidden_layers)
    aligned, arguments = trained_folder(planned, plan), plan_arguments(planned)
    files = [] if aligned is None else sorted(aligned.glob("*.safetensors"))
    record = {"plan": arguments, "mixers": {file.name: file_hash(file) for file in files}}
    student = folder / NAME
    if resume and student.is_dir():
        if read_json(folder / RECORD) != record:
            raise ValueError(
                f"{str(folder)!r} belongs to a run with another plan than {str(plan)!r}; give that plan, start again"
                " with --no-resume, or give another output folder"
            )
        return student
    folder.mkdir(parents=True, exist_ok=True)
    remove_folder(student, beside=student)
    write_json(folder / RECORD, record)
    fill = None if aligned is None else partial(load_aligned, folder=aligned)
    convert_to_folder(teacher, student, partial(convert_model, **arguments), fill=fill)
    return student
