"""`memmix sample-teacher`: answers of the teacher to prompts, as data for `memmix distill`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.command_options import command
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


class SampleOptions:
    """The options of `memmix sample-teacher`."""

    teacher: Teacher
    prompts: Annotated[
        list[Path], typer.Option(help="Files of prompts or conversations, as --text of align reads them; repeatable.")
    ]
    out_dir: Annotated[Path, typer.Option("--out", help="Folder to write answers.jsonl to.")]
    text_field: TextField = None
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens of an answer.")] = 512
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="0 takes the likeliest tokens.", show_default="the teacher's generation_config.json"
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample, from the likeliest tokens that have this probability together.",
            show_default="the teacher's generation_config.json",
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Seed of the sampling.")] = 0
    batch_size: Annotated[int, typer.Option(min=1, help="Number of prompts that are answered together.")] = 8
    device: Device = None
    device_map: DeviceMap = None
    resume: Annotated[
        bool,
        typer.Option("--resume/--no-resume", help="Continue a run that was interrupted, or start again."),
    ] = True
    overwrite: Overwrite = False
    as_json: Json = False


@one_line_errors
@command(SampleOptions)
def sample_teacher(args) -> None:
    """Write the teacher's answers to prompts, as data to distill on: --text OUT/answers.jsonl --loss answers.

    Answers that do not end within --max-new-tokens are left out.
    """
    from hf_memmix.conversion.saving import check_not_read
    from hf_memmix.training.recipe import Sampling
    from hf_memmix.training.run_lock import check_run_target

    check_placement(args.device, args.device_map)
    how = Sampling(args.max_new_tokens, args.temperature, args.top_p, args.seed, args.batch_size)
    check_run_target(args.out_dir, args.overwrite)
    check_texts(args.prompts, args.text_field)
    check_not_read(args.out_dir, folder := given_teacher(args.teacher), *args.prompts)
    with library():
        from hf_memmix.conversion.hashes import teacher_hash
        from hf_memmix.training.sampling import ANSWERS, prompts_of
        from hf_memmix.training.sampling import sample_teacher as sample
        from hf_memmix.training.text_files import documents

    tokenizer = tokenizer_of(folder)
    tell_reading(args.prompts)
    tell_date(tokenizer)
    asked = prompts_of((row for source in args.prompts for row in documents(source, args.text_field)), tokenizer)
    if not all(prompt.tokens for prompt in asked):
        raise UserError("a prompt has no tokens; remove it")
    with progress("answering") as advance:
        record = sample(
            load(folder, args.device, device_map=args.device_map),
            tokenizer,
            asked,
            args.out_dir,
            how,
            teacher_id=teacher_hash(folder),
            resume=args.resume,
            overwrite=args.overwrite,
            progress=advance,
        )
    if args.as_json:
        print_json({name: value for name, value in record.items() if name != "config"} | {"out": str(args.out_dir)})
    else:
        left = f", {record['left_out']} that did not end left out" if record["left_out"] else ""
        out.print(f"{record['rows']} answers{left}; written to {args.out_dir / ANSWERS}", highlight=False)
