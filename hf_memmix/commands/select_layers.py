"""`memmix select` with one mixer: ranks the layers by what each loses, and writes a plan."""

from pathlib import Path

from rich.table import Table

from hf_memmix.commands.checks import library
from hf_memmix.commands.common import load, out, print_json, shared_tokenizer, tokenizer_of
from hf_memmix.commands.measure import environment_of
from hf_memmix.commands.progress import progress
from hf_memmix.errors import UserError
from hf_memmix.mixer_names import DEFAULT_MIXER

PLOT_ENDING = ".png"  # of what is written beside a plan


def select_layers(args) -> None:
    """Rank the layers of one mixer and write a plan.

    args: the options of `memmix select`, checked; `students` holds the folder of an aligned student, or nothing for a
        new conversion.
    """
    with library():
        from hf_memmix.conversion import LayerChoice, layers_to_keep
        from hf_memmix.conversion.layer_plan import write_plan
        from hf_memmix.conversion.limits import check_length, check_vocabularies
        from hf_memmix.training.evaluation.layer_selection import (
            choose,
            count_of,
            lost_answers,
            plot_ranking,
            rank_layers,
        )

    chosen = args.kept or LayerChoice.counted("0.25")
    teacher, (student,) = args.folder, args.students or [None]
    mixer = DEFAULT_MIXER if args.mixer is None else args.mixer
    tokenizer = tokenizer_of(teacher) if student is None else shared_tokenizer(teacher, student)
    teacher_model = load(teacher, args.device, device_map=args.device_map)
    num_layers = teacher_model.config.num_hidden_layers
    # wrong choices are refused before minutes of work
    named = layers_to_keep(chosen, num_layers) if chosen.count is None else None
    if named is None:
        count_of(chosen.count, num_layers, num_layers)
    check_length(teacher_model, "teacher", args.length, "--length", "give a shorter one")
    mixers = _mixers_for(teacher_model, student, mixer, args)
    check_student(mixers, student, teacher_model, teacher)
    check_mixers(mixers, student, named or [])
    check_vocabularies(mixers, teacher_model)
    kind = mixer if student is None else only_mixer(mixers, student)
    check_windows(mixers, args.length)
    data = selection_data(tokenizer, args, teacher_model)
    with progress("swapping layers") as advance:
        options = {"weight": args.weight, "batch_size": args.batch_size, "progress": advance}
        ranking = rank_layers(teacher_model, mixers, data.blocks, data.samples, **options)
    plan = {
        "mixer": kind,
        "keep": choose(ranking, chosen.count, num_layers) if named is None else named,
        "num_layers": num_layers,
        "mixers_of": args.student[0].name if args.student else "a fresh conversion",
        **data.record,
        "environment": environment_of({"teacher": teacher_model}),
    } | ranking
    write_plan(plan, args.out_file)
    plot_ranking(plan, args.out_file.with_suffix(PLOT_ENDING))
    if args.as_json:
        print_json(plan | {"out": str(args.out_file)})
        return
    table = Table("rank", "layer", "KL per token", "nll of answers", "stays")
    for row in sorted(plan["layers"], key=lambda row: row["rank"]):
        stays = "attention" if row["layer"] in plan["keep"] else ""
        table.add_row(str(row["rank"]), str(row["layer"]), f"{row['kl']:.4f}", f"{row['nll']:+.4f}", stays)
    out.print(table)
    if named is None and (lost := lost_answers(ranking, plan["keep"])):
        layer, least = lost
        out.print(
            f"layer {layer} costs the most answers and is not kept, because the KL of others is higher: if recall"
            f" counts more, give --weight {least + 0.01:.2f} or higher",
            soft_wrap=True,
        )
    out.print(f"memmix convert --plan {args.out_file} keeps layers {plan['keep']}")


def _mixers_for(teacher_model, student: Path | None, mixer: str, args):
    """The student whose mixers are measured in the teacher: that of a folder, or a new conversion with `mixer`.

    With a device map only its mixers have values. They are read from a folder, which a new conversion needs too.
    """
    import tempfile

    from hf_memmix.conversion import convert_model
    from hf_memmix.conversion.compare_in_turn import with_mixers
    from hf_memmix.conversion.loading import meta_teacher

    if args.device_map is None:
        return convert_model(teacher_model, mixer) if student is None else load(student, args.device)
    if student is not None:
        return with_mixers(meta_teacher(student), student, teacher_model)
    with tempfile.TemporaryDirectory(prefix="memmix-select-") as work:
        folder = Path(work) / "student"
        convert_model(args.folder, mixer, out=folder)
        return with_mixers(meta_teacher(folder), folder, teacher_model)


def selection_data(tokenizer, args, teacher):
    """The text and the probes of the options. Raises ValueError if the teacher does not have one of their tokens."""
    from hf_memmix.conversion.limits import check_tokens
    from hf_memmix.training.evaluation.selection_data import SelectionData

    names = ("text", "tasks", "length", "samples", "max_tokens", "seed", "weight")
    data = SelectionData.of(tokenizer, **{name: getattr(args, name) for name in names})
    drawn = [token for samples in data.samples.values() for sample in samples for token in sample.ids]
    check_tokens([*data.blocks.flatten().tolist(), *drawn], teacher, tokenizer, "the text")
    return data


def check_student(student, folder, teacher, teacher_folder) -> None:
    """Raise ValueError if a student cannot have come from a teacher."""
    if student.config.num_hidden_layers != teacher.config.num_hidden_layers:
        raise UserError(
            f"{folder} and {teacher_folder} have different numbers of layers; give the teacher it came from"
        )


def check_mixers(student, folder, kept: list[int]) -> None:
    """Raise ValueError if a layer of an aligned student that the plan does not keep has no mixer to measure."""
    from hf_memmix.mixer_names import ATTENTION

    kinds = getattr(student.config, "mixer_types", [])
    if missing := [i for i, kind in enumerate(kinds) if kind == ATTENTION and i not in kept]:
        raise UserError(
            f"layers {missing} of {folder} are attention, so no mixer can be measured there; give a student with"
            " mixers in all layers (memmix convert --keep-layers none, then memmix align)"
        )


def check_windows(student, length: int) -> None:
    """Raise ValueError if all mixers of a student are windows that read whole sequences: no layer loses anything."""
    from hf_memmix.training_length import only_window

    window = only_window(student.config)
    if window is not None and window >= length:
        raise UserError(
            f"--length is {length}, and a window of {window} tokens reads all of it, so no layer would lose anything;"
            " give longer sequences, or --stand-in window, whose windows are short"
        )


def only_mixer(student, folder: Path) -> str:
    """The mixer of a student. Raises ValueError if it has several, or none."""
    kinds = sorted({kind for kind in getattr(student.config, "mixer_types", []) if kind != "attention"})
    if len(kinds) != 1:
        raise UserError(
            f"{folder} has the mixers {kinds}; a plan is for one mixer: convert with one mixer in all layers"
        )
    return kinds[0]
