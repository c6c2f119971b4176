"""The command `memmix select`: which layers stay attention, and which of several mixers each other layer gets.

Without mixers and students it chooses the layers greedily before any training (`select_greedy`). With one mixer it
ranks them (`select_layers`). With --mixers, or several students, it aligns every candidate in every layer and chooses
a mixture under a budget (`select_mixture`).
"""

from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.command_options import command
from hf_memmix.commands.checks import (
    check_placement,
    check_texts,
    choice_of_layers,
    given_student,
    given_teacher,
    layers_of,
)
from hf_memmix.commands.common import Device, DeviceMap, Json, KeepCount, KeepLayers, Overwrite
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.commands.measure import BatchSize, Text
from hf_memmix.commands.select_greedy import (
    SEARCH_ENDING,
    WINDOW,
    check_stand_in,
    names_candidates,
    option_of,
    select_greedy,
)
from hf_memmix.commands.select_layers import PLOT_ENDING, select_layers
from hf_memmix.commands.select_mixture import MIXERS_ENDING, select_mixture
from hf_memmix.errors import UserError
from hf_memmix.mixer_names import DEFAULT_MIXER, DEFAULT_SINKS

CONTEXT = 4096  # tokens
# options of a mixture, in words, and of the alignment of its candidates
OF_MIXTURE = {"state_bytes": "a budget", "decode_ms": "a budget", "context": "the context"}
OF_ALIGNMENT = ("train_text", "recipe", "steps")


class Output:
    """What is read and written."""

    teacher: Annotated[Path, typer.Option(help="The transformer to convert: a folder or a Hub id.")]
    out_file: Annotated[
        Path, typer.Option("--out", help="JSON file to write the plan to; its plot is written beside it.")
    ]


class Candidates:
    """The mixers that are measured."""

    student: Annotated[
        list[Path] | None,
        typer.Option(
            help="A student with aligned mixers in all layers; default: a new conversion. Several: candidates."
        ),
    ] = None
    mixer: Annotated[str | None, typer.Option(help="Mixer of the new conversion.", show_default=DEFAULT_MIXER)] = None
    mixers: Annotated[
        str | None,
        typer.Option(help='Choose one of these mixers for every layer: names with commas between them, or "all".'),
    ] = None


class StandIn:
    """A choice before any training."""

    stand_in: Annotated[
        str | None,
        typer.Option(
            help='"window": choose the kept layers one by one, with short attention in all others.',
            show_default="window, unless mixers, students or the kept layers are named",
        ),
    ] = None
    window: Annotated[int | None, typer.Option(min=1, help="Tokens of these windows.", show_default=str(WINDOW))] = (
        None
    )
    sinks: Annotated[
        int | None,
        typer.Option(min=0, help="First tokens that these windows read as well.", show_default=str(DEFAULT_SINKS)),
    ] = None
    drop: Annotated[
        bool, typer.Option("--drop", help="Begin with attention in all layers, and take it from one after the other.")
    ] = False


class Budget:
    """What the student may cost."""

    keep_count: KeepCount = None
    keep_layers: KeepLayers = None
    state_bytes: Annotated[
        str | None, typer.Option(help='Budget of a mixture: bytes per sequence, e.g. "8MiB", at --context tokens.')
    ] = None
    decode_ms: Annotated[
        float | None,
        typer.Option(min=0.0, help="Budget of a mixture: milliseconds per token in all its mixers and attention."),
    ] = None
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in the cache of attention when costs count.", show_default=str(CONTEXT)),
    ] = None


class Alignment:
    """How the candidates of a mixture are aligned."""

    train_text: Annotated[
        list[Path] | None,
        typer.Option(help="Text, .jsonl or .parquet file to align the candidates of a mixture on; repeatable."),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(help="Recipe of this alignment: a bundled one or a YAML file.", show_default="align"),
    ] = None
    steps: Annotated[int | None, typer.Option(help="Number of steps of this alignment.")] = None


class Measurement:
    """What is measured on which text."""

    tasks: Annotated[
        str, typer.Option(help='Names of the probes that count, with commas between them, or "none".')
    ] = "niah,mentions"
    length: Annotated[int, typer.Option(min=16, help="Length of the sequences in tokens.")] = 256
    samples: Annotated[int, typer.Option(min=1, help="Number of sequences per probe and depth.")] = 16
    weight: Annotated[
        float, typer.Option(min=0.0, help="Weight of the probes' loss; the KL divergence has weight 1.")
    ] = 1.0
    max_tokens: Annotated[int, typer.Option(min=32, help="Number of tokens of text for the KL divergence.")] = 32768
    text: Text = None
    seed: Annotated[int, typer.Option(help="Seed of the random choices.")] = 0
    batch_size: BatchSize = 8


class SelectOptions(Measurement, Alignment, Budget, StandIn, Candidates, Output):
    """The options of `memmix select`."""

    device: Device = None
    device_map: DeviceMap = None
    overwrite: Overwrite = False
    as_json: Json = False


@one_line_errors
@command(SelectOptions)
def select(args) -> None:
    """Measure what each layer loses with a mixer in place of attention, and write a plan for `memmix convert`.

    A quarter of the layers, or --keep-count of them, stay attention. They are chosen one after the other, from the
    teacher alone, whose other layers read only the last --window tokens and the first --sinks tokens. With --mixer or
    --student, those stay that cost most with this mixer, or those of --keep-layers. With --mixers, every layer gets
    one of several mixers, under the budgets that are given; without --keep-count or --keep-layers no layer stays
    attention.

    With --device-map auto, the teacher is spread over all devices, and a mixer is on one only while it computes. The
    candidates of a mixture must then be aligned already.
    """
    from hf_memmix.assets import asset_path
    from hf_memmix.conversion.records import bytes_of
    from hf_memmix.training.evaluation.probes.tasks import check_tasks
    from hf_memmix.training.recipe import load_recipe

    check_placement(args.device, args.device_map)
    _check_output(args)
    check_stand_in(args)
    args.student = args.student or []
    several = args.mixers is not None or len(args.student) > 1
    _check_candidates(args, several)
    args.kept = choice_of_layers(args.keep_layers, args.keep_count)
    if args.state_bytes is not None:
        args.state_bytes = bytes_of(args.state_bytes, "--state-bytes")
    if args.tasks != "none":
        check_tasks(args.tasks)
    args.context = args.context or CONTEXT
    args.recipe = load_recipe(args.recipe or "align", stage="align", steps=args.steps, seed=args.seed)
    # choices use the development text, reported figures use the held-out text
    args.text = asset_path("dev.txt") if args.text is None else args.text
    check_texts([args.text, *(args.train_text or [])])
    args.folder, args.students = given_teacher(args.teacher), [given_student(name) for name in args.student]
    if args.kept is not None:
        args.kept.number(layers_of(args.folder))
    if args.stand_in is not None or not names_candidates(args):
        select_greedy(args)
    else:
        select_mixture(args) if several else select_layers(args)


def _check_output(args) -> None:
    """Raise UserError unless the plan and what stands beside it have different names that are ours to write."""
    from hf_memmix.conversion.written import check_file

    if args.out_file.suffix in (PLOT_ENDING, MIXERS_ENDING, SEARCH_ENDING) or args.out_file.is_dir():
        raise UserError(
            f"--out is {str(args.out_file)!r}; give a JSON file; its plot gets the ending {PLOT_ENDING}, the folder of"
            f" aligned mixers {MIXERS_ENDING}, and the file of a search {SEARCH_ENDING}"
        )
    check_file(args.out_file, args.overwrite, '"num_layers"', "a plan")
    # without its plan the plot is not ours, and `--overwrite` would not help: "(?!)" is found in no file
    ours = args.out_file.exists()
    plot = args.out_file.with_suffix(PLOT_ENDING)
    check_file(plot, args.overwrite or not ours, "" if ours else "(?!)", "a plot")


def _check_candidates(args, several: bool) -> None:
    """Raise UserError if two options name the candidates, or an option belongs to a mixture and there is none."""
    from hf_memmix.mixer_names import check_mixer_name

    if args.mixers is not None and args.device_map is not None:
        raise UserError(
            "--mixers aligns its candidates, for which the teacher must be on one device, but --device-map is 'auto';"
            " align each candidate (memmix align), and give the students with --student"
        )
    if args.mixers is not None and (args.student or args.mixer is not None):
        raise UserError(
            f"--mixers is {args.mixers!r}, but {'--student' if args.student else '--mixer'} also names candidates;"
            " give one"
        )
    for name, words in {}.items() if several else OF_MIXTURE.items():
        if getattr(args, name) is not None:
            raise UserError(
                f"{option_of(name)} is {words} of a mixture; name its candidates with --mixers, or leave it out"
            )
    for name in OF_ALIGNMENT if args.mixers is None else ():
        if getattr(args, name) is not None:
            raise UserError(
                f"{option_of(name)} belongs to the alignment of candidates, but none is aligned here; name them with"
                " --mixers, or leave it out"
            )
    if args.mixer is not None:
        check_mixer_name(args.mixer)
    if args.mixers is None:
        return
    args.mixers = args.mixers.strip() if args.mixers.strip() == "all" else [k.strip() for k in args.mixers.split(",")]
    if args.mixers != "all":
        if repeated := [kind for kind in args.mixers if args.mixers.count(kind) > 1]:
            raise UserError(f"--mixers names {repeated[0]!r} twice")
        for kind in args.mixers:
            check_mixer_name(kind)
    if args.train_text is None:
        raise UserError("give --train-text, the text on which the candidates are aligned, or aligned students")
