"""Four tasks with examples before the question, from what a Debian machine has; lm-eval scores them.

    python training/experiments/smollm2/few_shot.py --out .scratch/few_shot
    memmix run lm_eval --model hf --model_args pretrained=STUDENT --include_path .scratch/few_shot \\
        --tasks memmix_few_shot --output_path .scratch/few_shot_student

    package_section   the section of a Debian package, from its description
    part_of_speech    noun, verb, adjective or adverb, from an entry of a dictionary (GCIDE)
    source_language   the language of lines of source code
    arithmetic        sums, differences and products of small numbers

Each task is there twice: NAME_choice compares the log-likelihoods of all answers, NAME_generated lets the model
generate and asks for an exact match; `exact_answers` counts the latter without lm-eval. All labels are about
equally frequent. Writes JSONL files, task files for lm-eval (JSON, which is YAML), and `sources.json` with the
versions of the packages. Needs apt and dpkg.
"""

import gzip
import json
import random
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.conversion.records import write_json
from hf_memmix.training.evaluation.probes.material import Answer, Sample
from hf_memmix.training.evaluation.probes.score import score
from hf_memmix.training.experiments.bundled import fetch_text
from hf_memmix.training.experiments.common.debian_text import files

GROUP = "memmix_few_shot"
SECTIONS = ("database", "fonts", "games", "graphics", "mail", "math", "python", "sound")
SPEECH = {"n.": "noun", "v. t.": "verb", "v. i.": "verb", "a.": "adjective", "adv.": "adverb"}
LANGUAGES = {  # packages and files of a language
    "C": ("linux-libc-dev", r"usr/include/linux/.*\.h$"),
    "Go": ("golang-1.19-src", r"go-1\.19/src/[a-z]+/[a-z]+\.go$"),
    "Lisp": ("emacs-el", r"share/emacs/.*\.el\.gz$"),
    "Perl": ("perl-modules-5.36", r"share/perl/.*\.pm$"),
    "Python": ("libpython3.11-stdlib", r"usr/lib/python3\.11/[a-z]+\.py$"),
    "Ruby": ("libruby3.1", r"usr/lib/ruby/3\.1\.0/.*\.rb$"),
}
PACKAGES = ("dict-gcide", *(package for package, _ in LANGUAGES.values()))
LINES, WIDTH = 8, 100  # of a piece of source code
EXAMPLES = 16  # rows from which the examples before a question are taken
SHOTS = 8  # examples before a question
NLL = "_nll"
END = "\n"  # of an answer
BLANK = "\n\n"  # between an answer and the next example

Labelled = dict[str, list[str]]  # texts by their label


def sections(root: Path) -> Labelled:
    known = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    found = {section: [] for section in SECTIONS}
    for package in known.split("\n\n"):
        fields = dict(re.findall(r"^(Section|Description): (.*)$", package, re.M))
        if fields.get("Section") in found and "Description" in fields:
            found[fields["Section"]].append(f"Package: {fields['Description']}\nSection:")
    return found


def speech(root: Path) -> Labelled:
    with gzip.open(root / "usr/share/dictd/gcide.dict.dz") as file:
        text = file.read().decode("utf-8", "replace")
    found = {kind: [] for kind in SPEECH.values()}
    for entry in re.split(r"\n(?=\S[^\n]*\\)", text):
        head, *lines = entry.split("\n")
        kind = re.match(r"([a-zA-Z]{4,}) \\[^\\]*\\,? (n\.|v\. t\.|v\. i\.|a\.|adv\.)(?: |$)", head)
        begin = next((i for i, line in enumerate(lines) if re.match(r" {3}(1\. )?[A-Z]", line)), None)
        if kind and begin is not None:
            meaning = " ".join(line.strip() for line in lines[begin : begin + 3]).removeprefix("1. ")
            meaning = re.split(r"[.;\[{]", meaning)[0].strip()
            if len(meaning.split()) > 2:
                found[SPEECH[kind[2]]].append(f"Word: {kind[1].lower()}\nMeaning: {meaning}\nPart of speech:")
    return found


def languages(root: Path) -> Labelled:
    found = {}
    for name, (_, pattern) in LANGUAGES.items():
        found[name] = []
        for text in files(root, pattern, mixed=True):
            lines = [line for line in text.split("\n") if line.strip()]
            middle = lines[len(lines) // 2 :][:LINES]
            if len(middle) == LINES and max(map(len, middle)) < WIDTH:
                found[name].append("\n".join(["Code:", *middle, "Language:"]))
    return found


def sums(count: int, draw: random.Random) -> Iterator[dict]:
    for _ in range(count):
        a, b, sign = draw.randint(2, 99), draw.randint(2, 99), draw.choice("+-*")
        a, b = (draw.randint(2, 12), draw.randint(2, 12)) if sign == "*" else (max(a, b), min(a, b))
        right = {"+": a + b, "-": a - b, "*": a * b}[sign]
        near = draw.sample([right + off for off in (-10, -2, -1, 1, 2, 10) if right + off >= 0], 3)
        choices = sorted([right, *near])
        yield {"prompt": f"{a} {sign} {b} =", "choices": [str(n) for n in choices], "answer": choices.index(right)}


def balanced(found: Labelled, count: int, draw: random.Random) -> Iterator[dict]:
    """Rows of labels in turn, until one label has no more texts; the texts of a label are in a random order."""
    labels = sorted(found)
    texts = {label: draw.sample(sorted(set(found[label])), len(set(found[label]))) for label in labels}
    for number in range(min(count, len(labels) * min(map(len, texts.values())))):
        label = labels[number % len(labels)]
        yield {"prompt": texts[label].pop(), "choices": labels, "answer": labels.index(label)}


TASKS: dict[str, Callable[[Path, int, random.Random], Iterator[dict]]] = {
    "package_section": lambda root, count, draw: balanced(sections(root), count, draw),
    "part_of_speech": lambda root, count, draw: balanced(speech(root), count, draw),
    "source_language": lambda root, count, draw: balanced(languages(root), count, draw),
    "arithmetic": lambda root, count, draw: sums(count, draw),
}


def task_files(name: str, folder: Path, shots: int) -> dict[str, dict]:
    """The two tasks of lm-eval by their names."""
    data = {split: str(folder / f"{name}.{split}.jsonl") for split in ("train", "test")}
    shared = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": data}, "training_split": "train",
        "test_split": "test", "fewshot_split": "train", "num_fewshot": shots, "doc_to_text": "{{prompt}}",
        "fewshot_config": {"sampler": "first_n"},
    }  # fmt: skip
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
    choice["metric_list"] = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    generated = {"output_type": "generate_until", "doc_to_target": "{{choices[answer]}}"}
    generated |= {"generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 8}}
    exact = {"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}
    generated["metric_list"] = [exact | {"aggregation": "mean", "higher_is_better": True}]
    strip = [{"function": "remove_whitespace"}, {"function": "take_first"}]
    generated["filter_list"] = [{"name": "none", "filter": strip}]
    kinds = {"choice": choice, "generated": generated}
    return {f"{name}_{kind}": {"task": f"{name}_{kind}"} | shared | fields for kind, fields in kinds.items()}


def questions(folder: Path, name: str, tokenizer) -> list[Sample]:
    """The questions of a task behind its examples, as lm-eval writes them, padded at the end to one length. An answer
    is what follows its question, with the end of its line.

    Raises:
        ValueError: the tokenizer joins an answer with its question.
    """
    train, test = (
        [json.loads(line) for line in (folder / f"{name}.{split}.jsonl").read_text(encoding="utf-8").splitlines()]
        for split in ("train", "test")
    )
    examples = "".join(f"{row['prompt']} {row['choices'][row['answer']]}{BLANK}" for row in train[:SHOTS])
    pairs = []
    for row in test:
        asked = tokenizer(examples + row["prompt"])["input_ids"]
        answer = f" {row['choices'][row['answer']]}"
        # tokens of the answer as they stand in an example: another one follows
        read = tokenizer(examples + row["prompt"] + answer + BLANK + train[0]["prompt"])["input_ids"]
        stops = range(len(asked) + 1, len(read) + 1)
        ends = (end for end in stops if tokenizer.decode(read[len(asked) : end]).startswith(answer + END))
        end = next(ends, None)
        if end is None or read[: len(asked)] != asked:
            raise ValueError(f"{name}: this tokenizer joins {answer!r} with the text around it")
        pairs.append((asked, read[len(asked) : end]))
    longest = max(len(asked) + len(answer) for asked, answer in pairs)
    samples = []
    for asked, answer in pairs:
        end = len(asked) + len(answer)
        ids = [*asked, *answer] + [answer[-1]] * (longest - end)
        samples.append(Sample(ids, ids, [Answer(len(asked), end)]))
    return samples


def answered(model, tokenizer, folder: Path, batch_tokens: int) -> dict[str, float]:
    """By task, the share of questions to which a model that generates greedily gives the exact answer; by task and
    `NLL`, the mean negative log-likelihood of the right answers in nats.
    """
    found, made = {}, json.loads((folder / "sources.json").read_text(encoding="utf-8"))
    for name in made["questions"]:
        samples = questions(folder, name, tokenizer)
        scores = score(model, samples, max(1, batch_tokens // len(samples[0].ids)), control=False)
        found[name] = sum(one.exact for one in scores) / len(scores)
        found[name + NLL] = sum(one.nll for one in scores) / len(scores)
    return found


def main(
    out: Annotated[Path, typer.Option(help="folder for questions and task files")],
    packages: Annotated[Path | None, typer.Option(help="folder that keeps the packages, for another run")] = None,
    count: Annotated[int, typer.Option(min=1, help="most questions of a task")] = 400,
    shots: Annotated[int, typer.Option(min=0, max=EXAMPLES, help="examples before a question")] = SHOTS,
    seed: Annotated[int, typer.Option(help="seed of the choice and order of questions")] = 0,
    only: Annotated[list[str], typer.Option(help="tasks to make; repeatable")] = tuple(TASKS),
) -> None:
    """Write the questions and the task files."""
    out.mkdir(parents=True, exist_ok=True)
    names = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if packages is None else packages
        folder.mkdir(parents=True, exist_ok=True)
        versions = {} if [*only] == ["arithmetic"] else fetch_text.unpack(list(PACKAGES), folder)
        sizes = {}
        for name in only:
            draw = random.Random(f"{seed} {name}")
            rows = list(TASKS[name](folder / "root", EXAMPLES + count, draw))
            draw.shuffle(rows)  # examples whose labels stand in turn would tell the next one
            sizes[name] = len(rows) - EXAMPLES
            for split, part in (("train", rows[:EXAMPLES]), ("test", rows[EXAMPLES:])):
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
                (out / f"{name}.{split}.jsonl").write_text(lines, encoding="utf-8")
            for task, fields in task_files(name, out, shots).items():
                write_json(out / f"{task}.yaml", fields, indent=2)
                names.append(task)
    write_json(out / f"{GROUP}.yaml", {"group": GROUP, "task": names}, indent=2)
    used = {package: version for package, version in versions.items() if package in PACKAGES}
    write_json(out / "sources.json", {"questions": sizes, "seed": seed, "packages": used}, indent=2)
    print(sizes)


if __name__ == "__main__":
    typer.run(main)
