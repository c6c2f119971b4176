"""The card of a converted model. All its figures come from the JSON output of memmix commands.

Every measurement contains a hash of the model that was measured, its weights and its configuration, and one of its
teacher. If the model in the folder has another hash, writing the card and uploading the folder are refused. A card is
also refused if its measurements are of several teachers.
"""

import hashlib
import json
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_memmix.conversion.layer_choice import layer_text
from hf_memmix.conversion.model_files import chat_template_of, check_model_folder
from hf_memmix.conversion.records import markdown_table
from hf_memmix.errors import UserError
from hf_memmix.training.evaluation.probes.gains import gain_text
from hf_memmix.training.stage_time import time_text

# what the example of a card does with the tokenizer and the model; a model with a chat template is asked
CONTINUE = """prompt = tokenizer("It was a fine morning, and", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=80)[0]))"""
ASK = """messages = [{"role": "user", "content": "What is a sonnet?"}]
options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
prompt = tokenizer.apply_chat_template(messages, **options).to(model.device)
answer = model.generate(**prompt, max_new_tokens=200)[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))"""
TEMPLATE = Path(__file__).with_name("card_template.md")


def weights_of(folder: str | Path) -> str:
    """A hash of the weights and the configuration in a model folder, which is stored in measurements.

    The same weights compute something else with other options of a mixer or another scaling of the rotation.

    Raises:
        ValueError: the folder holds no weights, or no configuration.
    """
    files = sorted(Path(folder).glob("*.safetensors")) or sorted(Path(folder).glob("pytorch_model*.bin"))
    if not files:
        raise UserError(f"{str(folder)!r} holds no weights; save the model there first")
    config = {k: v for k, v in check_model_folder(folder).items() if k != "transformers_version"}
    total = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in files:
        with file.open("rb") as content:
            total.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return total.hexdigest()


def student_config(folder: Path) -> dict:
    """config.json of a converted model. Raises ValueError if the folder holds no converted model."""
    config = check_model_folder(folder)
    if "mixer_types" not in config:
        raise UserError(f"{str(folder)!r} is not a converted model; memmix convert makes one")
    return config


def student_card(
    folder: str | Path,
    report: dict,
    *,
    base_model: str,
    license: str,
    repo: str | None = None,
    language: str = "en",
    probes: dict | None = None,
    stages: list[dict] | None = None,
    plan: dict | None = None,
) -> str:
    """The text of the card.

    Args:
        report: output of `memmix report --json` for this folder.
        base_model, license, language: the teacher's name, its licence and the language, as the Hub writes them.
        probes: output of `memmix eval`.
        stages: outputs of `memmix align --json` and `memmix distill --json`.
        plan: the plan of `memmix select`.
        repo: name that the model will have on the Hub; default: the name of the folder.

    Raises:
        ValueError: the folder is not a converted model, another model was measured, the measurements are of two
            teachers, the model was converted by another plan, or a name is not valid on the Hub.
    """
    from hf_memmix.mixers import MIXERS  # needs torch; the checks of a folder do not

    _check_names(base_model, repo, license, language)
    folder = Path(folder)
    config = student_config(folder)
    weights = weights_of(folder)
    for what, measured in (("report", report.get("weights")), ("probes", _probed(probes, "student"))):
        if measured is not None and measured != weights:
            raise UserError(
                f"the {what} was measured with other weights or another config.json than those in {str(folder)!r};"
                " repeat the measurement"
            )
    teacher = teacher_of(report)
    if teacher is not None and _probed(probes, "teacher") not in (None, teacher):
        raise UserError(
            "the report and the probes were measured with two teachers of different weights or config.json; repeat one"
            " of the two measurements"
        )
    kinds = config["mixer_types"]
    kept = [i for i, kind in enumerate(kinds) if kind == "attention"]
    used = sorted({kind for kind in kinds if kind != "attention"})
    _check_plan(plan, kinds, kept, used)
    name = repo or folder.name
    data = ModelCardData(
        license=license,
        language=[language],
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base_model,
        base_model_relation="finetune",
        tags=["hf_memmix", *used, *_kinds_of_attention(used, config.get("mixers", {})), "distillation"],
        model_name=name,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type="text",
                dataset_name=_named(report["text"]),
                metric_type="perplexity",
                metric_value=round(report["student_ppl"], 3),
            )
        ],
    )
    attention = f"{len(kept)} of {len(kinds)}"
    rows = [
        [_teacher_name(teacher), f"{len(kinds)} of {len(kinds)}", f"{report['teacher_ppl']:.2f}", "1", "", ""],
        ["this model", attention, f"{report['student_ppl']:.2f}", f"{report['ppl_ratio']:.4f}"]
        + [f"{report['top1_agreement']:.1%}", f"{report['kl']:.4f}"],
    ]
    where = report["environment"]
    content = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name.split("/")[-1],
        repo=name,
        base=base_model,
        example=CONTINUE if chat_template_of(folder) is None else ASK,
        converted=len(kinds) - len(kept),
        layers=len(kinds),
        kept=f" Attention, with its growing cache, remains in layer {', '.join(map(str, kept))}." if kept else "",
        mixers="\n".join(f"- {MIXERS[kind].summary or kind}.{_windows(folder, kind)}" for kind in used),
        tokens=f"{report['tokens']:,}",
        text=_named(report["text"]),
        block_size=report["block_size"],
        where=f"{where['hardware']}, torch {where['torch']}, transformers {where['transformers']}",
        evaluation=markdown_table(["model", "attention layers", "perplexity", "ratio", "same token", "KL"], rows),
        recall=_recall(probes),
        training=_training(stages),
        plan=_plan(plan),
        weights=weights,
    ).content
    return re.sub(r"\n{3,}", "\n\n", content).rstrip() + "\n"


def check_card(folder: str | Path) -> ModelCard:
    """The card in a model folder.

    Raises:
        ValueError: there is no card, it was not written by `memmix card`, or it describes another model.
    """
    path = Path(folder) / "README.md"
    if not path.is_file():
        raise UserError(f"{str(folder)!r} has no card (README.md); memmix card writes one from measurements")
    card = ModelCard.load(path)
    described = re.search(r"<!-- weights ([0-9a-f]{64}) -->", card.content)
    if described is None or "hf_memmix" not in (card.data.tags or []):
        raise UserError(f"{str(path)!r} is not a card of memmix card, which writes one from measurements")
    if described[1] != weights_of(folder):
        raise UserError(
            f"{str(path)!r} describes other weights or another config.json than those in its folder; repeat memmix"
            " report and memmix card"
        )
    return card


def _check_names(base_model: str, repo: str | None, license: str, language: str) -> None:
    """Raise ValueError for a name that would break the card's metadata or its links."""
    names = {"base model": base_model} | ({} if repo is None else {"repository": repo})
    for what, name in names.items():
        try:
            validate_repo_id(name)
        except HFValidationError:
            raise UserError(f"the {what} is {name!r}; give its name on the Hub, e.g. Qwen/Qwen3-0.6B") from None
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise UserError(f"the license is {license!r}; give an identifier of the Hub, e.g. apache-2.0, mit or other")
    if not re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]+)*", language):
        raise UserError(f"the language is {language!r}; give a code such as en, de or pt-BR")


def _check_plan(plan: dict | None, kinds: list[str], kept: list[int], used: list[str]) -> None:
    """Raise ValueError if the model was not converted by this plan."""
    if plan is None:
        return
    converted = {"num_layers": len(kinds), "keep": kept, "mixer": used[0] if len(used) == 1 else used}
    converted["mixer_types"] = kinds
    for name, value in converted.items():
        if name in plan and plan[name] != value:
            raise UserError(
                f"the plan has {name} {plan[name]}, but the model has {value}; give the plan of its conversion"
            )


def teacher_of(report: dict) -> str | None:
    """The hash of the teacher that was measured (`weights_of`)."""
    return report.get("teacher", {}).get("weights")


def is_other_base_model(report: dict, base_model: str) -> bool:
    """Whether the base model is in the Hub's cache on this machine, and is not the teacher that was measured."""
    config, teacher = try_to_load_from_cache(base_model, "config.json"), teacher_of(report)
    if not isinstance(config, str) or teacher is None:
        return False
    try:
        return weights_of(Path(config).parent) != teacher
    except UserError:  # only a part of it is there
        return False


def _teacher_name(weights: str | None) -> str:
    return "teacher" if weights is None else f"teacher (hash {weights[:12]})"


def _probed(probes: dict | None, role: str) -> str | None:
    return None if probes is None else probes["models"].get(role, {}).get("weights")


def _named(texts: list[dict]) -> str:
    return ", ".join(f"{text['file']} (sha256 {text['sha256'][:12]})" for text in texts)


def _recall(probes: dict | None) -> str:
    if probes is None:
        return ""
    roles, settings = list(probes["models"]), probes["settings"]
    head = ["probe", "chance", *(f"{role}{what}" for what in ("", ", nats gained") for role in roles)]
    rows = []
    for row in probes["summary"]:
        shown = [row[role] for role in roles]
        shares = ["" if s is None else f"{s['exact'] if s['choice'] is None else s['choice']:.1%}" for s in shown]
        gains = [gain_text(s) for s in shown]
        rows.append([row["task"], "" if row["chance"] is None else f"{row['chance']:.1%}", *shares, *gains])
    lengths = ", ".join(map(str, settings["lengths"]))
    return (
        f"\nRecall at lengths {lengths}: the share of right choices among the candidates (for mentions and copies: of "
        "exact answers), and the nats that an answer token gains from what the context says about it (±: the standard "
        f"error over {settings.get('gain_error_over', 'answers')}).\n\n"
        f"{markdown_table(head, rows)}\n"
    )


def _kinds_of_attention(used: list[str], mixers: dict) -> list[str]:
    """The Hub's tags of memories and of windows, alone or beside a memory. mixers: the options by mixer."""
    windows = "window" in used or any(mixers.get(kind, {}).get("local_window") for kind in used)
    return ["linear-attention"] * (used != ["window"]) + ["sliding-window-attention"] * windows


def _windows(folder: Path, kind: str) -> str:
    """What the windows read in the layers of the mixer `kind`, which they are or beside which they stand."""
    from hf_memmix.conversion.loading import read_config

    config, layers = read_config(folder), {}
    for layer, options in config.windows().items():
        if config.mixer_types[layer] == kind:
            layers.setdefault(_read_by(options.window, options.sinks), []).append(layer)
    if not layers:
        return ""
    where = {read: "" if len(layers) == 1 else f" (layers {layer_text(own)})" for read, own in layers.items()}
    read = " or ".join(read + own for read, own in where.items())
    who = "It" if kind == "window" else "In the same layers, exact attention"
    return f" {who} reads {read}, whose keys and values are cached."


def _read_by(window: int, sinks: int | None) -> str:
    """The tokens that a window reads, in words."""
    firsts = f" and the first {'one' if sinks == 1 else sinks}" if sinks else ""
    return f"the last {window} tokens{firsts}"


def _training(stages: list[dict] | None) -> str:
    if not stages:
        return ""
    rows = [[s["stage"], s["steps"], f"{s['tokens']:,}", f"{s['last_loss']:.4f}", time_text(s)] for s in stages]
    return f"\n## Training\n\n{markdown_table(['stage', 'steps', 'tokens', 'last loss', 'time'], rows)}\n"


def _plan(plan: dict | None) -> str:
    if plan is None:
        return ""
    if "mixer_types" in plan:
        return _mixture(plan)
    if "trace" in plan:
        return _greedy(plan)
    ranked = sorted(plan["layers"], key=lambda row: row["rank"])
    scores = ", ".join(f"{row['layer']} ({row['score']:.3f})" for row in ranked)
    return f"\nCost of replacing each layer alone by its mixer, in nats: {scores}.\n"


def _greedy(plan: dict) -> str:
    """The layers in the order of their choice, each with the loss after it."""
    first, *steps = plan["trace"]
    losses = ", ".join(f"{row['layer']} ({row['loss']:.3f})" for row in steps)
    stand_in = plan["stand_in"]
    change = "lost its attention" if stand_in.get("drop") else "got its attention back"
    read = _read_by(stand_in["window"], stand_in.get("sinks"))
    return (
        f"\nKept layers: chosen before training, with attention to {read} in place of the mixers;"
        f" one layer after the other {change}. Loss in nats: {first['loss']:.3f} before, then {losses}.\n"
    )


def _mixture(plan: dict) -> str:
    """The scores behind a plan for several mixers; the chosen one of each layer is bold."""
    rows = []
    for row, chosen in zip(plan["scores"], plan["mixer_types"], strict=True):
        cells = {kind: f"{row['mixers'][kind]['score']:.3f}" for kind in plan["candidates"]}
        rows.append([row["layer"], *(f"**{text}**" if kind == chosen else text for kind, text in cells.items())])
    table = markdown_table(["layer", *plan["candidates"]], rows)
    return f"\nCost of replacing each layer alone by each mixer, in nats; the chosen mixer is bold:\n\n{table}\n"
