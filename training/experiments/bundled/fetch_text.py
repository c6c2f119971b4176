"""Collect the English prose that the bundled teacher is trained on, from public-domain texts in Debian packages.

    python -m hf_memmix.training.experiments.bundled.fetch_text --out .scratch/teacher

Downloads the packages with `apt-get download`, unpacks them with `dpkg -x` into a scratch folder, extracts and cleans
the texts, and writes `train.txt`, `dev.txt`, `heldout.txt`, `sample.txt` (part of `train.txt`) and `sources.json`.
A document is a chapter; documents are separated by a line holding `<|endoftext|>`, paragraphs by an empty line.
The split is by chapter (novels) or whole book (scripture and its commentary, which quote each other). It is made
before the tokenizer or a model is trained. Choices (a schedule, a default) use `dev.txt`, reported figures use
`heldout.txt`. The script needs apt and dpkg.
"""

import hashlib
import html
import json
import random
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.conversion.records import write_json

SEPARATOR = "<|endoftext|>"
SOURCES = {
    "austen": {
        "package": "r-cran-janeaustenr",
        "title": "Jane Austen: Sense and Sensibility, Pride and Prejudice, Mansfield Park, Emma, Northanger Abbey, "
        "Persuasion (1811-1818)",
        "licence": "public domain (author died 1817); the package around it is MIT",
    },
    "melville": {
        "package": "r-cran-tokenizers",
        "title": "Herman Melville: Moby Dick; or, The Whale (1851)",
        "licence": "public domain (author died 1891); the package around it is MIT",
    },
    "kjv": {
        "package": "bible-kjv-text",
        "title": "The Bible, King James Version (1611)",
        "licence": "public domain (copyright expired)",
    },
    "henry": {
        "package": "sword-comm-mhcc",
        "title": "Matthew Henry's Concise Commentary on the Whole Bible (1706-1721)",
        "licence": 'public domain ("Public Domain--Copy Freely", debian/copyright)',
    },
    "spurgeon": {
        "package": "sword-comm-tdavid",
        "title": "C. H. Spurgeon: The Treasury of David, the expositions (1865-1885)",
        "licence": "public domain (author died 1892)",
    },
}
READER_PACKAGES = ["bible-kjv"]  # holds the program that decompresses bible-kjv-text; no text is taken from it

# whole books, chosen without a parallel account elsewhere (unlike the gospels, Kings and Chronicles)
HELDOUT_BOOKS = {"Ruth": "Ruth", "Daniel": "Dan", "Jonah": "Jonah", "Philippians": "Phil", "James": "Jas"}
DEV_BOOKS = {"Esther": "Esth", "Hosea": "Hos", "Joel": "Joel", "Galatians": "Gal", "1 John": "1John"}
HELDOUT_CHAPTER, DEV_CHAPTER, CHAPTER_PERIOD = 8, 16, 20  # of the novels: chapters 9, 29, 49, ... and 17, 37, 57, ...
# the demo's schedule and the start of a conversion were once chosen on the first 20,000 tokens of the shuffled
# held-out text; the documents that hold these and two more are dev text since
SEEN_DOCUMENTS = 14

Document = tuple[str, str]  # (split, text), later (source, text)


def read_r_strings(path: Path) -> Iterator[list[str]]:
    """Yield the character vectors of an R lazy-load database (`.rdb`): zlib chunks of XDR, version 3."""
    data, position = path.read_bytes(), 0
    while position < len(data):
        stream = zlib.decompressobj()
        chunk = stream.decompress(data[position + 4 :])
        position = len(data) - len(stream.unused_data)
        at = 14  # format mark, three version numbers
        at += 4 + int.from_bytes(chunk[at : at + 4], "big")  # native encoding
        kind, count = struct.unpack(">II", chunk[at : at + 8])
        if kind & 0xFF != 16:
            raise ValueError(f"{path}: an R object of type {kind & 0xFF} where a character vector (16) was expected")
        at, strings = at + 8, []
        for _ in range(count):
            length = int.from_bytes(chunk[at + 4 : at + 8], "big")
            strings.append(chunk[at + 8 : at + 8 + length].decode())
            at += 8 + length
        yield strings


def read_sword_blocks(base: Path, unit: str) -> Iterator[str]:
    """Yield the zlib blocks (one per book, unit "b", or chapter, "c"; OSIS markup) of a compressed SWORD module."""
    blocks = base.with_suffix(f".{unit}zz").read_bytes()
    for offset, size, _ in struct.iter_unpack("<III", base.with_suffix(f".{unit}zs").read_bytes()):
        if size:
            yield zlib.decompress(blocks[offset : offset + size]).decode()


def paragraphs(lines: list[str]) -> str:
    """Join hard-wrapped lines into one line per paragraph and put typographic marks into plain ASCII prose."""
    joined = re.split(r"\n\s*\n", "\n".join(line.rstrip() for line in lines))
    texts = [re.sub(r"\s+", " ", p.replace("_", "")).strip() for p in joined]
    return "\n\n".join(t for t in texts if t)


def split_of_chapter(index: int) -> str:
    return {HELDOUT_CHAPTER: "heldout", DEV_CHAPTER: "dev"}.get(index % CHAPTER_PERIOD, "train")


def split_of_book(name: str) -> str:
    if name in HELDOUT_BOOKS or name in HELDOUT_BOOKS.values():
        return "heldout"
    return "dev" if name in DEV_BOOKS or name in DEV_BOOKS.values() else "train"


def austen(root: Path) -> Iterator[Document]:
    end = re.compile(r"\s*(THE END|FINIS|A NOTE ON THE TEXT)\s*$", re.IGNORECASE)
    heading = re.compile(r"\s*(CHAPTER ([IVXLC]+|\d+)|VOLUME [IVX]+)\s*$", re.IGNORECASE)
    index = 0
    for lines in read_r_strings(root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"):
        stop = next((i for i, line in enumerate(lines) if end.match(line)), len(lines))
        marks = [i for i, line in enumerate(lines[:stop]) if heading.match(line)]
        for start, following in zip(marks, [*marks[1:], stop], strict=True):
            text = paragraphs(lines[start + 1 : following])
            if len(text) > 500:  # a volume heading is followed at once by its first chapter's
                yield split_of_chapter(index), text
                index += 1


def melville(root: Path) -> Iterator[Document]:
    [[book]] = read_r_strings(root / "usr/lib/R/site-library/tokenizers/data/Rdata.rdb")
    book = book.replace("\r\n", "\n").split("\nEnd of Project")[0]
    chapters = re.split(r"\n\n(?:CHAPTER \d+\. [^\n]*|Epilogue)\n", book)[1:]
    for index, chapter in enumerate(chapters):
        yield split_of_chapter(index), paragraphs(chapter.split("\n"))


def kjv(root: Path) -> Iterator[Document]:
    program = [str(root / "usr/bin/bible"), "-p", str(root / "usr/lib"), "Gen1:1-Rev22:21"]
    text = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^((?:\d )?[A-Z][A-Za-z ]+) \d+\n", text, flags=re.MULTILINE)[1:]
    for book, chapter in zip(parts[::2], parts[1::2], strict=True):
        yield split_of_book(book), paragraphs([re.sub(r"^  \d+ ", "", line) for line in chapter.split("\n")])


def osis_prose(markup: str) -> str:
    """Reduce OSIS markup to paragraphs of prose: no titles, tables, references, nor lists of verse numbers."""
    markup = re.sub(r"<title.*?</title>|<table>.*?</table>|<hi type=.bold.*?</hi>", "\n\n", markup, flags=re.DOTALL)
    markup = re.sub(r"(?:[,;]?\s*<reference[^>]*>[^<]*</reference>)+", "", markup)
    markup = re.sub(r'<div [^>]*type="x-p"[^>]*>', "\n\n", markup)
    text = paragraphs(html.unescape(re.sub(r"<[^>]*>", "", markup)).split("\n"))
    kept = [p.lstrip(",; 0123456789") for p in text.split("\n\n") if not re.search(r"\([^)]*\d\)", p)]
    return "\n\n".join(p for p in kept if len(p) > 60)


def henry(root: Path) -> Iterator[Document]:
    for testament in ("ot", "nt"):
        for block in read_sword_blocks(root / f"usr/share/sword/modules/comments/zcom/mhcc/{testament}", "b"):
            book = re.search(r'osisID="(\w+)" \w+="\w+" type="book"', block)
            for chapter in re.split(r"<chapter n=", block)[1:] if book else []:
                text = osis_prose(chapter.split(">", 1)[1])
                if len(text) > 200:
                    yield split_of_book(book[1]), text


def spurgeon(root: Path) -> Iterator[Document]:
    """Only the expositions. All of them are training text, because they quote the psalms verse by verse."""
    marks = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"") | {0x2014: "--", 0x2013: "-"}
    for psalm in read_sword_blocks(root / "usr/share/sword/modules/comments/zcom/tdavid/ot", "c"):
        for part in re.split(r"(?=<title)", psalm):
            if re.match(r"<title[^>]*>\s*(EXPOSITION|Psalm \d+ OVERVIEW)", part):
                text = osis_prose(part).translate(marks).replace(" --", "--")
                text = "\n\n".join(p for p in text.split("\n\n") if p.isascii())  # drops what cites Hebrew or Greek
                if len(text) > 500:
                    yield "train", text


def unpack(packages: list[str], scratch: Path) -> dict[str, str]:
    """Download Debian packages to `scratch` and unpack them into `scratch`/root; returns the version of each.

    Packages that are there already are not downloaded or unpacked again.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    present = set(scratch.glob("*.deb"))
    if missing := [name for name in packages if not any(scratch.glob(f"{name}_*.deb"))]:
        subprocess.run(["apt-get", "download", "-qq", *missing], cwd=scratch, check=True, stderr=subprocess.DEVNULL)
    versions = {}
    for archive in sorted(scratch.glob("*.deb")):
        if archive not in present:
            subprocess.run(["dpkg", "-x", str(archive), str(scratch / "root")], check=True)
        fields = ["dpkg-deb", "--show", "--showformat", "${Package} ${Version}", str(archive)]
        name, version = subprocess.run(fields, capture_output=True, text=True, check=True).stdout.split()
        versions[name] = version
    return versions


def overlap(text: str, seen: set[int], words: int = 13) -> float:
    """Share of the `words`-grams of `text` that also occur in the training text."""
    grams = word_grams(text, words)
    return sum(g in seen for g in grams) / max(1, len(grams))


def word_grams(text: str, words: int = 13) -> list[int]:
    tokens = re.findall(r"\w+", text.lower())
    return [hash(tuple(tokens[i : i + words])) for i in range(len(tokens) - words + 1)]


def join(documents: list[str]) -> str:
    return "".join(f"{text}\n{SEPARATOR}\n" for text in documents)


def main(
    out: Annotated[Path, typer.Option(help="folder for the texts and sources.json")],
    sample_bytes: Annotated[int, typer.Option(help="size of sample.txt, a part of train.txt")] = 980_000,
) -> None:
    """Collect, clean and split the texts."""
    out.mkdir(parents=True, exist_ok=True)

    splits: dict[str, list[Document]] = {"train": [], "dev": [], "heldout": []}
    report: dict[str, dict] = {"sources": {}, "files": {}}
    with tempfile.TemporaryDirectory() as scratch:
        versions = unpack([s["package"] for s in SOURCES.values()] + READER_PACKAGES, Path(scratch))
        for name, extract in zip(SOURCES, (austen, melville, kjv, henry, spurgeon), strict=True):
            for split, text in extract(Path(scratch) / "root"):
                splits[split].append((name, text))

    # one order for every reader of the file: a stretch of it is then a fair sample of all sources
    for documents in splits.values():
        random.Random(0).shuffle(documents)
    splits["dev"] += splits["heldout"][:SEEN_DOCUMENTS]
    del splits["heldout"][:SEEN_DOCUMENTS]
    for name, source in SOURCES.items():
        sizes = {split: sum(len(t.encode()) for n, t in documents if n == name) for split, documents in splits.items()}
        report["sources"][name] = source | {"version": versions[source["package"]], "bytes": sizes}

    texts = {split: [text for _, text in documents] for split, documents in splits.items()}
    sample, size = [], 0
    for text in texts["train"]:
        size += len(join([text]).encode())
        if size > sample_bytes:
            break
        sample.append(text)
    seen = set(word_grams(join(texts["train"])))
    for name, documents in {**texts, "sample": sample}.items():
        content = join(documents)
        (out / f"{name}.txt").write_text(content, encoding="utf-8")
        report["files"][f"{name}.txt"] = {
            "documents": len(documents),
            "bytes": len(content.encode()),
            "sha256": hashlib.sha256(content.encode()).hexdigest(),
        }
        if name in ("dev", "heldout"):
            report["files"][f"{name}.txt"]["13_gram_overlap_with_train"] = round(overlap(content, seen), 4)
    write_json(out / "sources.json", report, indent=2)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    typer.run(main)
