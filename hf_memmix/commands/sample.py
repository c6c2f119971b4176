"""`memmix sample-teacher`: answers of the teacher to prompts, as data for `memmix distill`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.commands.checks import check_placement, check_texts, given_teacher, library
from hf_memmix.commands.common import (
    Device,
    DeviceMap,
    Json,
    Overwrite,
    Teacher,
    TextField,
    load,
    out,
    print_json,
    tokenizer_of,
)
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.commands.progress import progress, tell_date, tell_reading
from hf_memmix.errors import UserError


@one_line_errors
def sample_teacher(
    teacher: Teacher,
    prompts: Annotated[
        list[Path], typer.Option(help="Files of prompts or conversations, as --text of align reads them; repeatable.")
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder to write answers.jsonl to.")],
    text_field: TextField = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens of an answer.")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="0 takes the likeliest tokens.", show_default="the teacher's generation_config.json"
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample, from the likeliest tokens that have this probability together.",
            show_default="the teacher's generation_config.json",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Seed of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of prompts that are answered together.")] = 8,
    device: Device = None,
    device_map: DeviceMap = None,
    resume: Annotated[
        bool,
        typer.Option("--resume/--no-resume", help="Continue a run that was interrupted, or start again."),
    ] = True,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write the teacher's answers to prompts, as data to distill on: --text OUT/answers.jsonl --loss answers.

    Answers that do not end within --max-new-tokens are left out.
    """
    from hf_memmix.conversion.saving import check_not_read
    from hf_memmix.training.recipe import check_sampling
    from hf_memmix.training.run_lock import check_run_target

    check_placement(device, device_map)
    check_sampling(temperature, top_p)
    check_run_target(out_dir, overwrite)
    check_texts(prompts, text_field)
    check_not_read(out_dir, folder := given_teacher(teacher), *prompts)
    with library():
        from hf_memmix.conversion.hashes import teacher_hash
        from hf_memmix.training.sampling import ANSWERS, prompts_of
        from hf_memmix.training.sampling import sample_teacher as sample
        from hf_memmix.training.text_files import documents

    tokenizer = tokenizer_of(folder)
    tell_reading(prompts)
    tell_date(tokenizer)
    asked = prompts_of((document for source in prompts for document in documents(source, text_field)), tokenizer)
    if not all(prompt.tokens for prompt in asked):
        raise UserError("a prompt has no tokens; remove it")
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    with progress("answering") as advance:
        record = sample(
            load(folder, device, device_map=device_map),
            tokenizer,
            asked,
            out_dir,
            **settings,
            batch_size=batch_size,
            teacher_id=teacher_hash(folder),
            resume=resume,
            overwrite=overwrite,
            progress=advance,
        )
    if as_json:
        print_json({name: value for name, value in record.items() if name != "config"} | {"out": str(out_dir)})
    else:
        left = f", {record['left_out']} that did not end left out" if record["left_out"] else ""
        out.print(f"{record['rows']} answers{left}; written to {out_dir / ANSWERS}", highlight=False)
