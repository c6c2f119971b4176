"""`memmix select --stand-in window`: a greedy choice of the kept layers from the teacher alone."""

from datetime import timedelta

from rich.table import Table

from hf_memmix.commands.checks import layers_of, library
from hf_memmix.commands.common import load, out, print_json, tokenizer_of
from hf_memmix.commands.measure import environment_of
from hf_memmix.commands.progress import progress, tell
from hf_memmix.commands.select_layers import PLOT_ENDING, selection_data
from hf_memmix.errors import UserError
from hf_memmix.mixer_names import DEFAULT_MIXER, DEFAULT_SINKS

SEARCH_ENDING = ".search"  # of the file with the measurements, beside the plan
STAND_IN = "window"
WINDOW = 64  # tokens


def option_of(name: str) -> str:
    """The option that fills a field of the arguments."""
    return f"--{name.replace('_', '-')}"


def names_candidates(args) -> bool:
    """Whether an option names mixers to measure, or the layers to keep; else windows stand in for them."""
    return bool(args.student or args.mixer or args.mixers or args.keep_layers)


def check_stand_in(args) -> None:
    """Raise UserError if an option belongs to another kind of `memmix select` than the one that is asked for."""
    if args.stand_in is None:
        values = {"--window": args.window, "--sinks": args.sinks}
        given = [f"{option} {value}" for option, value in values.items() if value is not None]
        if (given or args.drop) and names_candidates(args):
            raise UserError(
                f"{[*given, '--drop'][0]} belongs to a choice with stand-ins; add --stand-in window, or leave it out"
            )
        return
    if args.stand_in != STAND_IN:
        raise UserError(f"--stand-in is {args.stand_in!r}; it can be {STAND_IN}")
    names = ("student", "mixers", "train_text", "recipe", "steps", "state_bytes", "decode_ms", "context")
    if wrong := [option_of(name) for name in (*names, "keep_layers") if getattr(args, name)]:
        raise UserError(
            f"--stand-in window chooses the kept layers from the teacher alone and would not read {wrong[0]}; leave"
            " one of the two out"
        )


def select_greedy(args) -> None:
    """Choose the layers that stay attention with windows in place of the mixers, and write a plan.

    args: the options of `memmix select`, checked. The measurements stay in a file beside the plan: an interrupted
        search continues, and another number of kept layers needs few new measurements.
    """
    from hf_memmix.conversion.layer_choice import LayerChoice

    layers = layers_of(args.folder)
    count = (args.kept or LayerChoice.counted("0.25")).number(layers)
    if count == layers:
        raise UserError(f"--keep-count keeps all {layers} layers, so nothing is left to convert; keep fewer")
    with library():
        from hf_memmix.conversion.from_attention import start_of
        from hf_memmix.conversion.hashes import teacher_hash
        from hf_memmix.conversion.layer_plan import write_plan
        from hf_memmix.conversion.limits import check_length
        from hf_memmix.training.evaluation.greedy_choice import Search, plot_trace
        from hf_memmix.training.run_identity import config_of
        from hf_memmix.training.run_lock import run_lock

    kind = DEFAULT_MIXER if args.mixer is None else args.mixer
    start_of(kind)
    window = WINDOW if args.window is None else args.window
    windows = {"window": window, "sinks": DEFAULT_SINKS if args.sinks is None else args.sinks}
    file = args.out_file.with_suffix(SEARCH_ENDING)
    with run_lock(file):
        tokenizer = tokenizer_of(args.folder)
        teacher = load(args.folder, args.device, device_map=args.device_map)
        check_length(teacher, "teacher", args.length, "--length", "give a shorter one")
        if window >= args.length:
            tell(
                f"--window is {window}, and a sequence has {args.length} tokens (--length): no layer loses anything"
                " here; give a smaller window or longer sequences"
            )
        data = selection_data(tokenizer, args, teacher)
        hashed = teacher_hash(args.folder if args.device_map is not None else teacher)
        search = Search(
            teacher,
            data,
            **windows,
            drop=args.drop,
            weight=args.weight,
            batch_size=args.batch_size,
            file=file,
            identity=data.record | {"teacher": hashed, "config": config_of(teacher.config)},
            restart=args.overwrite,
        )

        def estimate(seconds: float) -> None:
            tell(f"the search takes about {timedelta(seconds=max(1, round(seconds)))}, by one measured forward")

        with progress("measuring sets of layers:") as advance:
            found = search.run(count, advance, estimate)
    plan = {
        "mixer": kind,
        "keep": found["keep"],
        "num_layers": layers,
        "stand_in": {"mixer": STAND_IN, "drop": args.drop, **windows},
        **data.record,
        "environment": environment_of({"teacher": teacher}),
        "teacher": found["teacher"],
        "trace": found["trace"],
    }
    write_plan(plan, args.out_file)
    plot_trace(plan, args.out_file.with_suffix(PLOT_ENDING))
    if args.as_json:
        print_json(plan | {"out": str(args.out_file)})
        return
    change = "loses attention" if args.drop else "gets attention back"
    table = Table("kept", change, "loss", "KL per token", "nll of answers")
    for row in plan["trace"]:
        layer = "" if row["layer"] is None else str(row["layer"])
        table.add_row(str(row["kept"]), layer, f"{row['loss']:.4f}", f"{row['kl']:.4f}", f"{row['nll']:+.4f}")
    out.print(table)
    out.print(f"memmix convert --plan {args.out_file} keeps layers {plan['keep']}")
