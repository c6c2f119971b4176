"""What the experiments with SmolLM2 share: the teacher, the search for kept layers, the measurement of a student."""

import functools
import random
import time
from pathlib import Path

import numpy
import torch
from transformers import AutoTokenizer

from hf_memmix.conversion import load_model, report
from hf_memmix.conversion.hashes import teacher_hash
from hf_memmix.conversion.limits import limit_of
from hf_memmix.serving.footprint import Footprint
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.evaluation.free_generation import divergence_of, generated_answers, greedy_tokens
from hf_memmix.training.evaluation.greedy_choice import Search
from hf_memmix.training.evaluation.probes import Material, counted_rows, draw, run_probes
from hf_memmix.training.evaluation.probes.grid import DEPTHS, means
from hf_memmix.training.evaluation.probes.material import Sample
from hf_memmix.training.evaluation.probes.score import score
from hf_memmix.training.evaluation.probes.tasks import needle
from hf_memmix.training.evaluation.selection_data import SelectionData
from hf_memmix.training.experiments.common.fit import autocast
from hf_memmix.training.experiments.common.harness import device
from hf_memmix.training.experiments.smollm2.few_shot import answered
from hf_memmix.training.experiments.smollm2.more_forms import MORE_FORMS
from hf_memmix.training.fact_drills import FactMaterial, with_drills
from hf_memmix.training.fact_words import FORMS
from hf_memmix.training.text_files import read_text

PERFECT = {"ppl_ratio": 1.0, "kl": 0.0, "top1_agreement": 1.0}  # the teacher's figures beside itself
CHOICE_SEED, FIGURE_SEED = 0, 1
PROBES = ("fact",)  # by default: the teacher answers less than 80 % of `facts`, so a student's answers do not count
CHOICE_PROBES = ("fact", "facts")
DRILLED = "drilled"  # the probe with sentences and words of the drills, which stands beside the others
FAR = 448  # tokens from a sentence to the question about it, so that no window of an arm holds the sentence
FEW_SHOT = "few_shot_"  # before the names of the tasks among the figures
TEXTS = ("heldout", "domain")
COMPARED_BLOCK = 1024  # tokens of a block of the texts that are compared
PROMPT = 256  # tokens before a generated text
GENERATED = 1024  # length of the sequences whose answers are generated
BATCH_TOKENS = 65536  # of a forward without a loss over all tokens


@functools.cache
def teacher_of(folder: Path):
    """The teacher, on a GPU in bf16, as it is stored."""
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    return load_model(folder, dtype=dtype).to(device())


def model_record(folder: Path) -> dict:
    """What results say of the teacher, without its place on this machine."""
    return {"folder": folder.name, "weights": teacher_hash(folder)}


@functools.cache
def tokenizer_of(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


@functools.cache
def tokens_of(data: Path, split: str) -> torch.Tensor:
    """The tokens [N] of a split that `corpus.py` has written."""
    return torch.from_numpy(numpy.load(data / f"{split}.npy", allow_pickle=False).astype(numpy.int64))


@functools.cache
def material_of(folder: Path, data: Path) -> Material:
    return Material(tokenizer_of(folder), read_text(data / "heldout.txt"))


@functools.cache
def drill_material_of(folder: Path, data: Path, more: bool = False) -> FactMaterial:
    """What drills are made from: training text, and words that the probes about the held-out text do not have."""
    tokens = numpy.load(data / "train.npy", allow_pickle=False)
    forms = FORMS + MORE_FORMS if more else FORMS
    return FactMaterial(tokenizer_of(folder), tokens, material_of(folder, data), forms)


def search_of(args, tasks: str, drop: bool = False, file: Path | None = None) -> Search:
    """The greedy search for kept layers of one direction, on development text."""
    data = SelectionData.of(
        tokenizer_of(args.teacher),
        text=args.text,
        tasks=tasks,
        length=args.length,
        samples=args.choice_samples,
        max_tokens=args.choice_tokens,
        seed=CHOICE_SEED,
        weight=1.0,
    )
    size = max(1, BATCH_TOKENS // args.length)
    return Search(
        teacher_of(args.teacher), data, window=args.window, sinks=args.sinks, drop=drop, batch_size=size, file=file
    )


@functools.cache
def drilled_blocks(folder: Path, data: Path, block_size: int, share: float, answers: float, more: bool) -> TokenBlocks:
    """The training rows, a share of which are drills."""
    rows = TokenBlocks(tokens_of(data, "train"), block_size)
    material = drill_material_of(folder, data, more)
    return with_drills(rows, tokenizer_of(folder), share, answers=answers, material=material)


@functools.cache
def own_blocks(folder: Path, data: Path, block_size: int) -> TokenBlocks:
    """Rows of the conversations that the teacher has written, see `own_prompts.py`; its answers alone count."""
    return TokenBlocks.from_files(data / "own" / "answers.jsonl", tokenizer_of(folder), block_size, loss="answers")


def recalled(model, args) -> list[dict]:
    """The cells of `run_probes` for one model, and such cells of `DRILLED`."""
    cells = []
    with autocast():
        for length in args.lengths:
            found = run_probes(
                {"model": model},
                material_of(args.teacher, args.data),
                tasks=tuple(args.probes),
                lengths=(length,),
                samples=args.samples,
                seed=FIGURE_SEED,
                batch_size=max(1, BATCH_TOKENS // length),
                control=False,
            )
            cells += found["cells"] + [drilled_cell(model, length, depth, args) for depth in DEPTHS]
    return cells


def drilled(material: FactMaterial, text: Material, length: int, depth: float, draw: random.Random) -> Sample:
    """A sample of `fact` with sentences and words of the drills, in the filler of `text`, which no drill has."""
    return needle(text, length, depth, draw, forms=(draw.choice(FORMS),), words=material.values, names=material.names)


def drilled_cell(model, length: int, depth: float, args) -> dict:
    text, material = material_of(args.teacher, args.data), drill_material_of(args.teacher, args.data)
    draws = [random.Random(f"{FIGURE_SEED} {DRILLED} {length} {depth} {i}") for i in range(args.samples)]
    samples = [drilled(material, text, length, depth, draw) for draw in draws]
    cell = {"task": DRILLED, "length": length, "depth": depth, "answers": len(samples)}
    size, read = max(1, BATCH_TOKENS // length), length <= limit_of(model)
    found = means(score(model, samples, size, control=False)) if read else None
    return cell | {"chance": 1 / len(samples[0].answers[0].candidates), "model": found}


def needles(args) -> list:
    length = min(GENERATED, max(args.lengths))
    material = material_of(args.teacher, args.data)
    return [s for depth in DEPTHS for s in draw("fact", material, length, depth, FIGURE_SEED, args.samples)]


def few_shot(model, args) -> dict[str, float]:
    """`answered` as flat figures; nothing without a folder of `few_shot.py`."""
    if args.few_shot is None:
        return {}
    with autocast():
        found = answered(model, tokenizer_of(args.teacher), args.few_shot, BATCH_TOKENS // 4)
    return {f"{FEW_SHOT}{name}": share for name, share in found.items()}


@functools.cache
def prompts_of(data: Path, count: int) -> torch.Tensor:
    """Prompts [count, PROMPT] from places spread over the held-out text."""
    tokens = tokens_of(data, "heldout")
    places = range(0, len(tokens) - PROMPT, len(tokens) // (count + 1))
    return torch.stack([tokens[at : at + PROMPT] for at in places[:count]])


class Measured:
    """Measurements of students beside those of the teacher, which are made once.

    args: has teacher, data, few_shot, probes, lengths, samples, measured_tokens, free_prompts and free_tokens.
    """

    def __init__(self, args):
        self.args, self.teacher = args, teacher_of(args.teacher)
        began = time.time()
        self.cells = recalled(self.teacher, args)
        with autocast():
            self.texts = greedy_tokens(self.teacher, prompts_of(args.data, args.free_prompts), args.free_tokens, 64)
            self.answers = numpy.mean(generated_answers(self.teacher, needles(args))).item()
        self.tasks = few_shot(self.teacher, args)
        self.seconds = round(time.time() - began, 1)

    def of_teacher(self) -> dict:
        """The figures of the teacher by the names of those of a student."""
        found = {f"{text}_{name}": value for text in TEXTS for name, value in PERFECT.items()}
        found |= self._recall(self.cells, "teacher") | {"generated_answers": self.answers, "same_texts": 1.0}
        return found | self.tasks

    def of(self, student) -> dict:
        """The figures of a student, flat, and `recall`, rows of `counted_rows`, with `texts` and `generation`."""
        args, found, texts = self.args, {}, {}
        for text in TEXTS:
            tokens = tokens_of(args.data, text)[: args.measured_tokens]
            with autocast():
                compared = report(student, self.teacher, tokens, block_size=COMPARED_BLOCK, batch_size=8)
            layers = compared.pop("layer_error")
            texts[text] = compared | {"layer_error": {str(layer): round(e, 5) for layer, e in layers.items()}}
            found |= {f"{text}_{name}": compared[name] for name in ("ppl_ratio", "kl", "top1_agreement")}
        own = recalled(student, args)
        found |= self._recall(own, "student")
        pairs = zip(own, self.cells, strict=True)
        cells = [{**ours, "student": ours["model"], "teacher": theirs["model"]} for ours, theirs in pairs]
        rows = counted_rows({"cells": [{k: v for k, v in cell.items() if k != "model"} for cell in cells]})
        with autocast():
            said = greedy_tokens(student, prompts_of(args.data, args.free_prompts), args.free_tokens, 64)
            answers = numpy.mean(generated_answers(student, needles(args))).item()
        generation = divergence_of(said, self.texts)
        found |= {"generated_answers": answers, "same_texts": generation["same"]} | few_shot(student, args)
        return found | {"recall": rows, "texts": texts, "generation": generation}

    @staticmethod
    def _recall(cells: list[dict], name: str) -> dict:
        """Flat figures, for example `fact_1024_choice`, and `fact_1024_far`: the choice where the sentence stands at
        least `FAR` tokens before the question.
        """
        found = {}
        far = [cell for cell in cells if (1 - cell["depth"]) * cell["length"] >= FAR]
        for row in counted_rows({"cells": far}):
            if row["model"] is not None:
                found[f"{row['task']}_{row['length']}_far"] = row["model"]["choice"]
        for row in counted_rows({"cells": cells}):
            if row["model"] is not None:
                at = f"{row['task']}_{row['length']}"
                found |= {f"{at}_{measure}": row["model"][measure] for measure in ("choice", "exact")}
        return found


_made: dict[str, Measured] = {}


def measured_of(args) -> Measured:
    """The `Measured` of these options, made once in a process."""
    sizes = (
        "teacher",
        "data",
        "few_shot",
        "probes",
        "lengths",
        "samples",
        "measured_tokens",
        "free_prompts",
        "free_tokens",
    )
    key = repr([getattr(args, name) for name in sizes])
    if key not in _made:
        _made[key] = Measured(args)
    return _made[key]


def layer_bytes(model) -> int:
    """Bytes of the state of one memory layer for one sequence; bf16 where it has the dtype of activations."""
    states = Footprint.of(model.config, torch.bfloat16).states
    return max(states.values())
