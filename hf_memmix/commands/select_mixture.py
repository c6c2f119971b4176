"""`memmix select` with several mixers: aligns every candidate in every layer and chooses a mixture under a budget."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.table import Table

from hf_memmix.commands.checks import library
from hf_memmix.commands.common import load, out, print_json, shape_of, shared_tokenizer, tokenizer_of
from hf_memmix.commands.devices import choose_device
from hf_memmix.commands.measure import environment_of
from hf_memmix.commands.progress import progress, tell_reading
from hf_memmix.commands.select_layers import PLOT_ENDING, check_student, only_mixer, selection_data
from hf_memmix.errors import UserError

MIXERS_ENDING = ".mixers"  # of the folder of aligned mixers beside a plan


def select_mixture(args) -> None:
    """Align and score every candidate in every layer, choose a mixture and write a plan.

    args: the options of `memmix select`, checked; `students` holds folders of aligned students, without which `mixers`
        names the candidates. The aligned mixers and the scores stay in a folder beside the plan: an interrupted run
        continues, and another budget needs no new measurement.
    """
    device = args.device
    if args.mixers is not None:  # before imports of libraries that ask CUDA for its GPUs
        choose_device(device)
        device = device and device.partition(":")[0]  # only this GPU is visible now
    with library():
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
        from hf_memmix.training.fact_drills import of_recipe
        from hf_memmix.training.run_lock import run_lock

    # wrong choices, and budgets that no mixture meets, are refused before hours of work
    teacher, recipe, blocks = args.folder, args.recipe, None
    config, shapes = read_config(teacher), meta_teacher(teacher)
    limits = _budget(args, config.num_hidden_layers)
    dtype = shape_of(teacher).dtype  # that of the loaded teacher
    kinds = _candidates(args.mixers)
    tokenizer, students, candidates = tokenizer_of(teacher), {}, dict.fromkeys(kinds)
    for folder in args.students:
        shared_tokenizer(teacher, folder)
        student = meta_teacher(folder)
        check_student(student, folder, shapes, teacher)
        if (kind := only_mixer(student, folder)) in students:
            raise UserError(f"{folder} and another student both have the mixer {kind}; give one student per mixer")
        students[kind], candidates[kind] = student, partial(load_model, folder, "float32")
        if args.device_map is not None:
            candidates[kind] = partial(_only_mixers, folder, dtype)
    students = students or {kind: convert_model(shapes.to("meta"), kind) for kind in kinds}
    costs = costs_of(shapes, students, args.context, config.dtype or shapes.dtype)
    check_budget(costs, limits)
    check_length(shapes, "teacher", args.length, "--length", "give a shorter one")

    data = selection_data(tokenizer, args, shapes)
    if kinds:
        if device == "cpu":
            recipe = replace(recipe, trainer=recipe.trainer | {"use_cpu": True})
        tell_reading(args.train_text)
        blocks = TokenBlocks.from_files(
            args.train_text, tokenizer, recipe.block_size, recipe.pack, recipe.bos, None, recipe.loss
        )
        blocks = of_recipe(blocks, tokenizer, recipe)
    teacher_model, kept_in = (
        load(teacher, device, device_map=args.device_map),
        args.out_file.with_suffix(MIXERS_ENDING),
    )
    scoring = {"weight": args.weight, "batch_size": args.batch_size}
    if args.device_map is not None:
        scoring |= {"teacher_id": teacher_hash(teacher), "place": partial(place_mixers, teacher=teacher_model)}
    with run_lock(kept_in):
        measured = measure_candidates(
            teacher_model, candidates, kept_in, data, costs, recipe=recipe, blocks=blocks, show=progress, **scoring
        )
    about = {"trained": kept_in.name, **data.record, "environment": environment_of({"teacher": teacher_model})}
    if blocks is not None:
        about |= {"recipe": asdict(recipe), "train_tokens": blocks.fingerprint()}
    plan = mixture_plan(measured, limits, args.context) | about
    write_plan(plan, args.out_file)
    plot_mixture(plan, args.out_file.with_suffix(PLOT_ENDING))
    if args.as_json:
        print_json(plan | {"out": str(args.out_file)})
        return
    _print_mixture(plan)
    out.print(f"memmix convert --teacher {args.teacher} --plan {args.out_file} takes these mixers", soft_wrap=True)


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


def _budget(args, num_layers: int):
    """The `Budget` of the options. Raises ValueError if it keeps all layers, or layers that do not exist."""
    from hf_memmix.conversion import layers_to_keep
    from hf_memmix.training.evaluation.mixer_search import Budget

    keep = [] if args.kept is None else layers_to_keep(args.kept, num_layers)
    named = args.kept is not None and args.kept.count is None
    return Budget(
        state_bytes=args.state_bytes,
        decode_ms=args.decode_ms,
        keep_count=len(keep),
        keep_layers=tuple(keep) if named else (),
    )


def _candidates(names: list[str] | str | None) -> list[str]:
    """The mixers that are aligned here. Raises ValueError for one that cannot start from attention."""
    from hf_memmix.conversion.from_attention import STARTS, start_of

    kinds = list(STARTS) if names == "all" else names or []
    for kind in kinds:
        start_of(kind)
    return kinds
