"""The command `memmix select`: which layers stay attention, and which of several mixers each other layer gets.

With one mixer it ranks the layers. With --mixers, or several students, it aligns every candidate in every layer and
chooses a mixture under a budget (`training.evaluation.mixer_search`).
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_memmix.commands.common import (
    Device,
    DeviceMap,
    Json,
    KeepCount,
    KeepLayers,
    OldKeep,
    Overwrite,
    check_placement,
    choice_of_layers,
    load,
    out,
    print_json,
    shape_of,
    shared_tokenizer,
    tokenizer_of,
)
from hf_memmix.commands.devices import choose_device
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.commands.hub import model_folder
from hf_memmix.commands.measure import BatchSize, Seed, Text, environment_of
from hf_memmix.commands.progress import progress, tell_reading

PLOT_ENDING, MIXERS_ENDING = ".png", ".mixers"  # endings of what is written beside a plan


@one_line_errors
def select(
    teacher: Annotated[Path, typer.Option(help="The transformer to convert: a folder or a Hub id.")],
    out_file: Annotated[
        Path, typer.Option("--out", help="JSON file to write the plan to; its plot is written beside it.")
    ],
    keep_count: KeepCount = None,
    keep_layers: KeepLayers = None,
    student: Annotated[
        list[Path] | None,
        typer.Option(
            help="A student with aligned mixers in all layers; default: a new conversion. Several: candidates."
        ),
    ] = None,
    mixer: Annotated[str | None, typer.Option(help="Mixer of the new conversion.", show_default="gka")] = None,
    mixers: Annotated[
        str | None,
        typer.Option(help='Choose one of these mixers for every layer: names with commas between them, or "all".'),
    ] = None,
    state_bytes: Annotated[
        str | None, typer.Option(help='Budget of a mixture: bytes per sequence, e.g. "8MiB", at --context tokens.')
    ] = None,
    decode_ms: Annotated[
        float | None,
        typer.Option(min=0.0, help="Budget of a mixture: milliseconds per token in all its mixers and attention."),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens in the cache of attention when costs count.")] = 4096,
    train_text: Annotated[
        list[Path] | None,
        typer.Option(help="Text, .jsonl or .parquet file to align the candidates of a mixture on; repeatable."),
    ] = None,
    recipe: Annotated[str, typer.Option(help="Recipe of this alignment: a bundled one or a YAML file.")] = "align",
    steps: Annotated[int | None, typer.Option(help="Number of steps of this alignment.")] = None,
    tasks: Annotated[
        str, typer.Option(help='Names of the probes that count, with commas between them, or "none".')
    ] = "niah,mentions",
    length: Annotated[int, typer.Option(min=16, help="Length of the sequences in tokens.")] = 256,
    samples: Annotated[int, typer.Option(min=1, help="Number of sequences per probe and depth.")] = 16,
    weight: Annotated[
        float, typer.Option(min=0.0, help="Weight of the probes' loss; the KL divergence has weight 1.")
    ] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=32, help="Number of tokens of text for the KL divergence.")] = 32768,
    text: Text = None,
    seed: Seed = 0,
    batch_size: BatchSize = 8,
    device: Device = None,
    device_map: DeviceMap = None,
    keep: OldKeep = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Measure what each layer loses with a mixer in place of attention, and write a plan for `memmix convert`.

    With one mixer, the layers that cost most stay attention: a quarter of them, --keep-count of them, or those of
    --keep-layers. With --mixers, every layer gets one of several mixers, under the budgets that are given; without
    --keep-count or --keep-layers no layer stays attention.

    With --device-map auto, the teacher is spread over all devices, and a mixer is on one only while it computes. The
    candidates of a mixture must then be aligned already.
    """
    from hf_memmix.assets import asset_path
    from hf_memmix.conversion.records import bytes_of
    from hf_memmix.conversion.written import check_file
    from hf_memmix.training.recipe import load_recipe

    check_placement(device, device_map)
    if device_map is not None and mixers is not None:
        raise ValueError(
            "--mixers aligns its candidates, for which the teacher must be on one device, but --device-map is 'auto';"
            " align each candidate (memmix align), and give the students with --student"
        )
    if out_file.suffix in (PLOT_ENDING, MIXERS_ENDING) or out_file.is_dir():
        raise ValueError(
            f"--out is {str(out_file)!r}; give a JSON file; its plot gets the ending {PLOT_ENDING}, and the folder of"
            f" aligned mixers {MIXERS_ENDING}"
        )
    check_file(out_file, overwrite, '"num_layers"', "a plan")
    check_file(out_file.with_suffix(PLOT_ENDING), out_file.exists(), "", "a plot")  # of this plan
    students = student or []
    several = mixers is not None or len(students) > 1
    if mixers is not None and (students or mixer is not None):
        raise ValueError(
            f"--mixers is {mixers!r}, but {'--student' if students else '--mixer'} also names candidates; give one"
        )
    if not several and (state_bytes is not None or decode_ms is not None):
        given = "--decode-ms" if state_bytes is None else "--state-bytes"
        raise ValueError(f"{given} is a budget of a mixture; name its candidates with --mixers, or leave it out")
    chosen = choice_of_layers(keep_layers, keep_count, keep, keep_counts=True)
    # choices use the development text, reported figures use the held-out text
    text = asset_path("dev.txt") if text is None else text
    measure = {"tasks": tasks, "length": length, "samples": samples, "weight": weight, "seed": seed}
    measure |= {"max_tokens": max_tokens, "text": text, "batch_size": batch_size}
    if not several:
        (given,) = students or [None]
        _select_layers(
            teacher, out_file, given, "gka" if mixer is None else mixer, chosen, measure, (device, device_map), as_json
        )
        return
    budget = {"state_bytes": None if state_bytes is None else bytes_of(state_bytes, "--state-bytes")}
    budget |= {"decode_ms": decode_ms, "context": context, "keep": chosen}
    training = {"text": train_text, "recipe": load_recipe(recipe, stage="align", steps=steps, seed=seed)}
    _select_mixers(teacher, out_file, students, mixers, budget, training, measure, (device, device_map), as_json)


def _select_layers(teacher, out_file: Path, given: Path | None, mixer, chosen, measure: dict, place, as_json) -> None:
    """Rank the layers of one mixer and write a plan.

    given: an aligned student, None for a new conversion. place: --device and --device-map.
    """
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

    chosen = chosen or LayerChoice.counted("0.25")
    teacher, student = model_folder(teacher), model_folder(given)
    tokenizer = tokenizer_of(teacher) if student is None else shared_tokenizer(teacher, student)
    device, device_map = place
    teacher_model = load(teacher, device, device_map=device_map)
    num_layers = teacher_model.config.num_hidden_layers
    # wrong choices are refused before minutes of work
    named = layers_to_keep(chosen, num_layers) if chosen.count is None else None
    if named is None:
        count_of(chosen.count, num_layers, num_layers)
    check_length(teacher_model, "teacher", measure["length"], "--length", "give a shorter one")
    mixers = _mixers_for(teacher_model, teacher, student, mixer, place)
    check_student(mixers, student, teacher_model, teacher)
    check_mixers(mixers, student, named or [])
    check_vocabularies(mixers, teacher_model)
    kind = mixer if student is None else only_mixer(mixers, student)
    data = _data(tokenizer, measure)
    with progress("swapping layers") as advance:
        options = {"weight": measure["weight"], "batch_size": measure["batch_size"], "progress": advance}
        ranking = rank_layers(teacher_model, mixers, data.blocks, data.samples, **options)
    plan = {
        "mixer": kind,
        "keep": choose(ranking, chosen.count, num_layers) if named is None else named,
        "num_layers": num_layers,
        "mixers_of": "a fresh conversion" if given is None else given.name,
        **data.record,
        "environment": environment_of({"teacher": teacher_model}),
    } | ranking
    write_plan(plan, out_file)
    plot_ranking(plan, out_file.with_suffix(PLOT_ENDING))
    if as_json:
        print_json(plan | {"out": str(out_file)})
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
    out.print(f"memmix convert --plan {out_file} keeps layers {plan['keep']}")


def _mixers_for(teacher_model, teacher: Path, student: Path | None, mixer: str, place):
    """The student whose mixers are measured in the teacher: that of a folder, or a new conversion with `mixer`.

    With a device map only its mixers have values. They are read from a folder, which a new conversion needs too.
    """
    import tempfile

    from hf_memmix.conversion import convert_model
    from hf_memmix.conversion.compare_in_turn import with_mixers
    from hf_memmix.conversion.loading import meta_teacher

    device, device_map = place
    if device_map is None:
        return convert_model(teacher_model, mixer) if student is None else load(student, device)
    if student is not None:
        return with_mixers(meta_teacher(student), student, teacher_model)
    with tempfile.TemporaryDirectory(prefix="memmix-select-") as work:
        folder = Path(work) / "student"
        convert_model(teacher, mixer, out=folder)
        return with_mixers(meta_teacher(folder), folder, teacher_model)


def _select_mixers(teacher, out_file: Path, given, mixers, budget, training, measure: dict, place, as_json) -> None:
    """Align and score every candidate in every layer, choose a mixture and write a plan.

    `given`: aligned students; without them `mixers` names the candidates. The aligned mixers and the scores stay in a
    folder beside the plan: an interrupted run continues, and another budget needs no new measurement.
    """
    device, device_map = place
    if mixers is not None:  # before imports of libraries that ask CUDA for its GPUs
        choose_device(device)
        device = device and device.partition(":")[0]  # only this GPU is visible now

    from dataclasses import asdict, replace
    from functools import partial

    from hf_memmix.conversion import convert_model, load_model
    from hf_memmix.conversion.compare_in_turn import place_mixers
    from hf_memmix.conversion.estimate import meta_teacher
    from hf_memmix.conversion.hashes import teacher_hash
    from hf_memmix.conversion.layer_plan import write_plan
    from hf_memmix.conversion.limits import check_length
    from hf_memmix.conversion.loading import read_config
    from hf_memmix.training.data import TokenBlocks
    from hf_memmix.training.evaluation.mixer_plan import mixture_plan, plot_mixture
    from hf_memmix.training.evaluation.mixer_search import check_budget, costs_of, measure_candidates
    from hf_memmix.training.run_lock import run_lock

    # wrong choices, and budgets that no mixture meets, are refused before hours of work
    teacher, recipe, blocks = model_folder(teacher), training["recipe"], None
    config, shapes = read_config(teacher), meta_teacher(teacher)
    limits = _budget(budget, config.num_hidden_layers)
    dtype = shape_of(teacher).dtype  # that of the loaded teacher
    kinds = [] if mixers is None else _candidates(mixers)
    if kinds and training["text"] is None:
        raise ValueError("give --train-text, the text on which the candidates are aligned, or aligned students")
    tokenizer, students, candidates = tokenizer_of(teacher), {}, dict.fromkeys(kinds)
    for folder in map(model_folder, given):
        shared_tokenizer(teacher, folder)
        student = meta_teacher(folder)
        check_student(student, folder, shapes, teacher)
        if (kind := only_mixer(student, folder)) in students:
            raise ValueError(f"{folder} and another student both have the mixer {kind}; give one student per mixer")
        students[kind], candidates[kind] = student, partial(load_model, folder, "float32")
        if device_map is not None:
            candidates[kind] = partial(_only_mixers, folder, dtype)
    students = students or {kind: convert_model(shapes.to("meta"), kind) for kind in kinds}
    costs = costs_of(shapes, students, budget["context"], config.dtype or shapes.dtype)
    check_budget(costs, limits)
    check_length(shapes, "teacher", measure["length"], "--length", "give a shorter one")

    data = _data(tokenizer, measure)
    if kinds:
        if device == "cpu":
            recipe = replace(recipe, trainer=recipe.trainer | {"use_cpu": True})
        tell_reading(training["text"])
        blocks = TokenBlocks.from_files(training["text"], tokenizer, recipe.block_size, recipe.pack, recipe.bos)
    teacher_model, kept_in = load(teacher, device, device_map=device_map), out_file.with_suffix(MIXERS_ENDING)
    scoring = {name: measure[name] for name in ("weight", "batch_size")}
    if device_map is not None:
        scoring |= {"teacher_id": teacher_hash(teacher), "place": partial(place_mixers, teacher=teacher_model)}
    with run_lock(kept_in):
        measured = measure_candidates(
            teacher_model, candidates, kept_in, data, costs, recipe=recipe, blocks=blocks, show=progress, **scoring
        )
    about = {"trained": kept_in.name, **data.record, "environment": environment_of({"teacher": teacher_model})}
    if blocks is not None:
        about |= {"recipe": asdict(recipe), "train_tokens": blocks.fingerprint()}
    plan = mixture_plan(measured, limits, budget["context"]) | about
    write_plan(plan, out_file)
    plot_mixture(plan, out_file.with_suffix(PLOT_ENDING))
    if as_json:
        print_json(plan | {"out": str(out_file)})
        return
    _print_mixture(plan)
    out.print(f"memmix convert --teacher {teacher} --plan {out_file} takes these mixers", soft_wrap=True)


def _only_mixers(folder: Path, dtype):
    """A student of which only the mixers have values."""
    from hf_memmix.conversion.compare_in_turn import read_mixers
    from hf_memmix.conversion.loading import meta_teacher

    return read_mixers(meta_teacher(folder), folder, dtype)


def _print_mixture(plan: dict) -> None:
    from hf_memmix.conversion.records import bytes_text

    candidates = plan["candidates"]
    table = Table("layer", *candidates, "chosen", title="loss by each mixer alone, nats")
    for row, kind in zip(plan["scores"], plan["mixer_types"], strict=True):
        cells = [f"{row['mixers'][name]['score']:+.4f}{' *' if name == kind else ''}" for name in candidates]
        table.add_row(str(row["layer"]), *cells, kind)
    out.print(table)
    costs = Table("mixture", "loss", "state", "decode, ms per token", "prefill, us per token")
    for name, row in {"chosen": plan["totals"], **{f"{k} alone": row for k, row in plan["single"].items()}}.items():
        decode = "not measured" if row["decode_ms"] is None else f"{row['decode_ms']:.3f}"
        prefill = "not measured" if row["prefill_us"] is None else f"{row['prefill_us']:.2f}"
        costs.add_row(name, f"{row['score']:+.4f}", bytes_text(row["state_bytes"]), decode, prefill)
    out.print(costs)
    out.print(
        f"loss: sum over layers; state of a sequence of {plan['budget']['context']} tokens; times of the mixers and"
        f" attention alone, estimated from measurements on an {plan['times_of']}",
        highlight=False,
    )


def _budget(budget: dict, num_layers: int):
    """The `Budget` of the options. Raises ValueError if it keeps all layers, or layers that do not exist."""
    from hf_memmix.conversion import layers_to_keep
    from hf_memmix.training.evaluation.mixer_search import Budget

    chosen = budget["keep"]
    keep = [] if chosen is None else layers_to_keep(chosen, num_layers)
    named = chosen is not None and chosen.count is None
    return Budget(
        state_bytes=budget["state_bytes"],
        decode_ms=budget["decode_ms"],
        keep_count=len(keep),
        keep_layers=tuple(keep) if named else (),
    )


def _candidates(text: str) -> list[str]:
    from hf_memmix.conversion.from_attention import STARTS, start_of

    kinds = list(STARTS) if text.strip() == "all" else [part.strip() for part in text.split(",")]
    if repeated := [kind for kind in kinds if kinds.count(kind) > 1]:
        raise ValueError(f"--mixers names {repeated[0]!r} twice")
    for kind in kinds:
        start_of(kind)
    return kinds


def _data(tokenizer, measure: dict):
    from hf_memmix.training.evaluation.selection_data import SelectionData

    return SelectionData.of(tokenizer, **{name: value for name, value in measure.items() if name != "batch_size"})


def check_student(student, folder, teacher, teacher_folder) -> None:
    """Raise ValueError if a student cannot have come from a teacher."""
    if student.config.num_hidden_layers != teacher.config.num_hidden_layers:
        raise ValueError(
            f"{folder} and {teacher_folder} have different numbers of layers; give the teacher it came from"
        )


def check_mixers(student, folder, kept: list[int]) -> None:
    """Raise ValueError if a layer of an aligned student that the plan does not keep has no mixer to measure."""
    from hf_memmix.mixers import ATTENTION

    kinds = getattr(student.config, "mixer_types", [])
    if missing := [i for i, kind in enumerate(kinds) if kind == ATTENTION and i not in kept]:
        raise ValueError(
            f"layers {missing} of {folder} are attention, so no mixer can be measured there; give a student with"
            " mixers in all layers (memmix convert --keep-layers none, then memmix align)"
        )


def only_mixer(student, folder: Path) -> str:
    """The mixer of a student. Raises ValueError if it has several, or none."""
    kinds = sorted({kind for kind in getattr(student.config, "mixer_types", []) if kind != "attention"})
    if len(kinds) != 1:
        raise ValueError(
            f"{folder} has the mixers {kinds}; a plan is for one mixer: convert with one mixer in all layers"
        )
    return kinds[0]
