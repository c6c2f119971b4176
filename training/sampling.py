"""Answers of the teacher to prompts, as conversations that `align` and `distill` read.

Rows are written batch by batch into a folder beside the output; an interrupted run continues after its last whole
batch. Each batch has a seed of its own, so a run that was interrupted writes what an uninterrupted one does. An answer
that does not end within `max_new_tokens` is left out: in training it would look as if it had ended.

Special tokens of an answer stay in its text, e.g. the marks of thoughts and of calls of tools, but for those that
begin and end a text or stand for nothing.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from hf_memmix.conversion.hashes import teacher_hash, write_sealed
from hf_memmix.conversion.limits import check_length, check_tokens
from hf_memmix.conversion.model_files import check_transformer
from hf_memmix.conversion.records import write_json
from hf_memmix.conversion.saving import explain_write_errors, place_of, remove_folder, replace_folder
from hf_memmix.conversion.text_rows import beginning_of, encode, end_tokens
from hf_memmix.conversion.written import mark_folder
from hf_memmix.errors import UserError
from hf_memmix.training.chat_rows import render, training_date
from hf_memmix.training.recipe import Sampling
from hf_memmix.training.run_identity import config_of, differences
from hf_memmix.training.run_lock import PARTIAL_FILE, run_folder
from hf_memmix.training.text_files import Conversation

ANSWERS, RECORD = "answers.jsonl", "sampling.json"


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt, and the row that it came from: a conversation up to the answer, or a text."""

    tokens: list[int]
    row: dict

    @property
    def is_text(self) -> bool:
        return "text" in self.row

    def answered(self, answer: str) -> dict:
        if self.is_text:
            return {"text": answer}
        return self.row | {"messages": [*self.row["messages"], {"role": "assistant", "content": answer}]}


def prompts_of(documents: Iterable[str | Conversation], tokenizer) -> list[Prompt]:
    """What the teacher is asked. A text is the message of a user, or is continued if there is no chat template.

    The last message of a conversation is left out if it is an answer: the teacher's replaces it.

    Raises:
        ValueError: a conversation does not fit the template, or has nothing to answer.
    """
    prompts = []
    for document in documents:
        if isinstance(document, str) and tokenizer.chat_template is None:
            prompts.append(Prompt(beginning_of(tokenizer) + encode(document, tokenizer), {"text": document}))
            continue
        if isinstance(document, str):
            document = Conversation([{"role": "user", "content": document}], None, "a prompt")
        messages, tools = document.messages, document.tools
        messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if not messages:
            raise UserError(f"{document.place} holds an answer without a question; remove it")
        text = render(Conversation(messages, tools, document.place), tokenizer, prompt=True)
        row = {"messages": messages} | ({} if tools is None else {"tools": tools})
        prompts.append(Prompt(encode(text, tokenizer), row))
    return prompts


@torch.no_grad()
def sample_teacher(
    teacher: nn.Module,
    tokenizer,
    prompts: list[Prompt],
    folder: str | Path,
    how: Sampling,
    *,
    teacher_id: str | None = None,
    resume: bool = True,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Write one row per prompt into `folder/answers.jsonl`; returns the record in `folder/sampling.json`.

    Args:
        teacher_id: `teacher_hash` of the teacher's folder; default: the hash of the model's tensors.
        resume: continue an interrupted run; otherwise its rows are removed.
        progress: `progress(done, total)` is called after every batch.

    Raises:
        ValueError: a prompt is too long for the teacher, the interrupted run had other settings or has lost rows, no
            answer has ended, or the teacher is a converted model.
    """
    check_transformer(teacher.config.to_dict())
    for prompt in prompts:
        check_tokens(prompt.tokens, teacher, tokenizer, "a prompt")
    longest = max(len(prompt.tokens) for prompt in prompts) + how.max_new_tokens
    check_length(teacher, "teacher", longest, "a prompt with --max-new-tokens", "ask for fewer")
    config = _generation_config(teacher, tokenizer, how)
    asked = json.dumps([asdict(prompt) for prompt in prompts], sort_keys=True)
    settings = {
        "teacher": teacher_id or teacher_hash(teacher),
        "config": config_of(teacher.config),
        "dtype": str(teacher.dtype),
        "device": teacher.device.type,
        "prompts": {"count": len(prompts), "hash": hashlib.sha256(asked.encode()).hexdigest()[:16]},
        "generation": config.to_diff_dict(),
        "date": training_date(tokenizer),
        "seed": how.seed,
        "batch_size": how.batch_size,
    }
    settings = json.loads(json.dumps(settings, default=str))
    remedy = "Whole batches are kept: make room and run the same command again to continue"
    with explain_write_errors(folder, remedy), run_folder(folder, resume, overwrite) as work:
        state = _continued(work, settings)
        work.mkdir(exist_ok=True)
        with (work / ANSWERS).open("r+b" if (work / ANSWERS).exists() else "w+b") as file:
            file.truncate(state["bytes"])  # a batch whose writing was interrupted is written again
            file.seek(state["bytes"])
            for first in range(state["prompts"], len(prompts), how.batch_size):
                batch = prompts[first : first + how.batch_size]
                torch.manual_seed(how.seed + first)
                for prompt, (answer, ended) in zip(batch, _answers(teacher, tokenizer, batch, config), strict=True):
                    if ended or prompt.is_text:
                        file.write(json.dumps(prompt.answered(answer), ensure_ascii=False).encode() + b"\n")
                        state["rows"] += 1
                    else:
                        state["left_out"] += 1
                file.flush()
                state |= {"prompts": first + len(batch), "bytes": file.tell()}
                write_json(work / PARTIAL_FILE, {"settings": settings, "state": state})
                if progress is not None:
                    progress(state["prompts"], len(prompts))
        if not state["rows"]:
            remove_folder(work, beside=place_of(folder))  # a run that asks for more is another run
            raise UserError(f"none of {len(prompts)} answers ended within {how.max_new_tokens} tokens; ask for more")
        record = settings | {"rows": state["rows"], "left_out": state["left_out"]}
        write_sealed(work / RECORD, record)
        (work / PARTIAL_FILE).unlink()
        mark_folder(work)
        replace_folder(work, place_of(folder))
    return record


def _generation_config(teacher, tokenizer, how: Sampling):
    """The teacher's own generation config with what was asked for."""
    config = copy.deepcopy(teacher.generation_config)
    given = {"max_new_tokens": how.max_new_tokens, "max_length": None}
    if how.temperature is not None:
        given |= {"do_sample": how.temperature > 0} | ({"temperature": how.temperature} if how.temperature else {})
    if how.top_p is not None:
        given |= {"top_p": how.top_p, "do_sample": True}
    given["eos_token_id"] = sorted(end_tokens(config, tokenizer)) or None
    if config.pad_token_id is None:
        given["pad_token_id"] = tokenizer.pad_token_id or tokenizer.eos_token_id
    config.update(**given)
    return config


def _continued(work: Path, settings: dict) -> dict:
    """How far an interrupted run has come. Raises ValueError if it had other settings, or rows of it are lost."""
    try:
        saved = json.loads((work / PARTIAL_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"prompts": 0, "rows": 0, "left_out": 0, "bytes": 0}
    if different := "; ".join(differences(saved["settings"], settings)):
        raise UserError(
            f"{str(work)!r} belongs to another run ({different}); give its settings, start again (--no-resume), or"
            " give another output folder"
        )
    state, file = saved["state"], work / ANSWERS
    written = file.stat().st_size if file.is_file() else 0
    if written < state["bytes"]:
        raise UserError(
            f"{str(file)!r} has {written} bytes, but the interrupted run has written {state['bytes']}; start again"
            " (--no-resume)"
        )
    return state


def _answers(teacher, tokenizer, batch: list[Prompt], config) -> list[tuple[str, bool]]:
    """The texts of the answers, or prompts that are texts with what follows; and whether each has ended by itself.

    In training, the tokenizer puts the tokens before a text that begin it, so these are left out here.
    """
    width = max(len(prompt.tokens) for prompt in batch)
    pad = config.pad_token_id or 0
    ids = torch.tensor([[pad] * (width - len(p.tokens)) + p.tokens for p in batch], device=teacher.device)
    mask = torch.tensor([[0] * (width - len(p.tokens)) + [1] * len(p.tokens) for p in batch], device=teacher.device)
    new = teacher.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
    ends = end_tokens(config, tokenizer)
    control = ends | {tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    answers = []
    for prompt, tokens in zip(batch, new, strict=True):
        count = next((i for i, token in enumerate(tokens) if token in ends), None)
        tokens = [*(prompt.tokens if prompt.is_text else []), *tokens[:count]]
        text = tokenizer.decode([token for token in tokens if token not in control])
        answers.append((text, count is not None))
    return answers
