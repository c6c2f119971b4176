"""The text and the probes with which layers and mixers are scored."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_memmix.conversion.text_rows import beginning_of, cut_rows
from hf_memmix.errors import UserError
from hf_memmix.training.data import tokenize_files, tokenizer_hash
from hf_memmix.training.evaluation.probes import TASKS, Material, draw
from hf_memmix.training.evaluation.probes.grid import DEPTHS
from hf_memmix.training.evaluation.probes.material import Sample
from hf_memmix.training.evaluation.probes.tasks import refuse_repeated
from hf_memmix.training.text_files import read_text, text_record


@dataclass(frozen=True)
class SelectionData:
    """What `rank_layers` reads: `blocks` [N, length] of token ids for the divergence, and `samples` of probes by task.

    `record` holds the settings as JSON values: `{"text": ..., "settings": ...}`.
    """

    blocks: Tensor
    samples: dict[str, list[Sample]]
    record: dict

    @classmethod
    def of(
        cls, tokenizer, *, text: Path, tasks: str, length: int, samples: int, max_tokens: int, seed: int, weight: float
    ) -> "SelectionData":
        """Blocks and probes of a text file. `tasks`: names of probes with commas between them, or "none".

        Raises:
            ValueError: the text is shorter than one block, there is no such probe, or one is named twice.
        """
        tokens = tokenize_files(text, tokenizer)[:max_tokens].tolist()
        rows = [row for row, _ in cut_rows([tokens], length, beginning_of(tokenizer)) if len(row) == length]
        if not rows:
            raise UserError(
                f"the {len(tokens)} tokens of {text} that are read are less than the {length} tokens of one sequence;"
                f" give a longer text, shorter sequences or, if it is below {length}, a larger max_tokens"
            )
        names = [] if tasks == "none" else [part.strip() for part in tasks.split(",")]
        refuse_repeated("task", names)
        material = Material(tokenizer, read_text(text)) if names else None
        drawn = {}
        for task in names:
            depths = DEPTHS if task in TASKS and TASKS[task].depths else (None,)
            drawn[task] = [s for depth in depths for s in draw(task, material, length, depth, seed, samples)]
        blocks = torch.tensor(rows)
        settings = {"tasks": names, "length": length, "samples": samples, "weight": weight, "seed": seed}
        settings |= {"tokens": blocks.numel(), "tokenizer": tokenizer_hash(tokenizer)}
        return cls(blocks, drawn, {"settings": settings, "text": text_record(text)})
