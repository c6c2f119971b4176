"""The identity of a run: its recipe, its data, and the weights of student and teacher at its start.

A run continues only a checkpoint with the same identity, which is stored in the checkpoint together with the hashes of
its files. Weights are compared by sha256 over all their bytes, at 0.4 to 2 GB per second: this takes 1 to 6 seconds
for a model of 1B parameters in bf16. Student and teacher are hashed in parallel. The files of a checkpoint are hashed
when it is written and when a run resumes from it, several at a time.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from torch import nn
from transformers import PreTrainedConfig
from transformers.trainer_utils import get_last_checkpoint

from hf_memmix import launch
from hf_memmix._transformers import IDLE_FIELDS
from hf_memmix.conversion.hashes import check_files, hash_files, read_sealed, teacher_hash, write_sealed
from hf_memmix.errors import UserError
from hf_memmix.training.recipe import Recipe

RUN_FILE = "memmix_run.json"
FORMAT = 3  # 2: of run files without a hash of their own content
# fields of a recipe that do not change what a run computes, up to rounding
RESUME_MAY_CHANGE = ("save_every", "chunk_tokens", "gradient_checkpointing", "cuda_graph")
# arguments of the Trainer that do not change what a run computes
TRAINER_MAY_CHANGE = (
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "disable_tqdm",
    "logging_steps",
    "project",
    "report_to",
    "run_name",
    "save_total_limit",
    "use_cpu",
)


def identity_of(student: nn.Module, teacher: nn.Module | None, data, recipe: Recipe) -> dict:
    """The identity of a run, as JSON values. A run and the checkpoint that it continues must have the same.

    `teacher` is None if `data` holds the teacher's probabilities; then the fingerprint of `data` includes its hash.
    """
    with ThreadPoolExecutor(2) as pool:  # hashing releases the GIL
        hashes = list(pool.map(lambda model: None if model is None else teacher_hash(model), (student, teacher)))
    identity = {
        "format": FORMAT,
        "recipe": deciding_fields(recipe),
        "data": data.fingerprint(),
        "mixer_types": list(student.config.mixer_types),
        "student": {"config": config_of(student.config), "weights": hashes[0]},
    }
    identity["teacher"] = None if teacher is None else {"config": config_of(teacher.config), "weights": hashes[1]}
    return json.loads(json.dumps(identity))


def deciding_fields(recipe: Recipe) -> dict:
    """The fields of a recipe that change what a run computes."""
    fields = {k: v for k, v in asdict(recipe).items() if k not in RESUME_MAY_CHANGE}
    return fields | {"trainer": {k: v for k, v in recipe.trainer.items() if k not in TRAINER_MAY_CHANGE}}


def config_of(config: PreTrainedConfig) -> dict:
    """A configuration as JSON values, without the fields that do not change what the model computes."""
    return {k: v for k, v in json.loads(config.to_json_string(use_diff=False)).items() if k not in IDLE_FIELDS}


def find_checkpoint(output_dir: str | Path, identity: dict) -> str | None:
    """The last checkpoint of `output_dir`, or None.

    Raises:
        ValueError: it belongs to another run, or one of its files is missing or was changed.
    """
    if not Path(output_dir).is_dir():
        return None
    last = get_last_checkpoint(str(output_dir))
    if last is None:
        return None
    saved = read_sealed(Path(last) / RUN_FILE, _remedy(last))
    different = "; ".join(differences(saved, identity))
    if different:
        raise UserError(
            f"{last} belongs to another run ({different}); give the recipe, data and models of that run, start again"
            " with resume off, or give another output folder"
        )
    if launch.is_first():  # if rank 0 fails, the launcher ends the other processes
        check_files(last, saved["files"], _remedy(last))
    return last


def differences(saved: dict, now: dict, within: str = "") -> Iterator[str]:
    """The fields in which the identities of two runs differ. A config may have new fields of a later transformers."""
    for key in sorted(now.keys() & saved.keys()) if within.endswith("config.") else now:
        old, value = saved.get(key), now[key]
        if isinstance(old, dict) and isinstance(value, dict):
            yield from differences(old, value, f"{within}{key}.")
        elif old != value:
            yield f"{within}{key} was {_short(old)}, is {_short(value)}"


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def write_run_file(folder: Path, identity: dict) -> None:
    """Write the identity and the hashes of all files of a complete checkpoint into its folder."""
    write_sealed(folder / RUN_FILE, {**identity, "files": hash_files(folder, without=[RUN_FILE])})


def _remedy(checkpoint: str | Path) -> str:
    folder = Path(checkpoint)
    others = sorted(p.name for p in folder.parent.glob("checkpoint-*") if p.name != folder.name)
    before = f"continue from {others[-1]}" if others else "start again"
    return f"remove that folder and run the same command again to {before}"
