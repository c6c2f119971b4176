"""Collects the text on which students of SmolLM2 are trained and measured, as tokens of its tokenizer.

    python training/experiments/smollm2/corpus.py --tokenizer SMOLLM2 --out .scratch/smollm2 \\
        --record training/experiments/smollm2/sources.json

About 300 MB of text in Debian packages: documentation of many programs and libraries, a free book on Debian, prose, a
dictionary and some source code. Lines that many pages of a source repeat (menus, copyright) are left out, and so are
short documents and repeated ones. Splits: `common/debian_text.py`. The documentation of PostgreSQL is held out as a
domain.

Writes `<split>.npy`: the tokens of a split as one stream, uint16, each document followed by `<|endoftext|>`, which
ended the documents of SmolLM2's own training; and `<split>.txt`, the first texts of a split that is not training text,
for commands that read text. The record holds packages, versions, licences, sizes and hashes.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy
import typer
from transformers import AutoTokenizer

from hf_memmix.conversion.records import write_json
from hf_memmix.training.experiments.bundled import fetch_text
from hf_memmix.training.experiments.common import debian_text
from hf_memmix.training.experiments.common.debian_text import END, MEGABYTE, Document, by_hash, files, manual, page

SHORTEST = 2000  # characters of a document
TEXT_SIZE = 2_000_000  # characters of the .txt files
# what the published runs have read: the first tokens of a split, and characters of a text
CUT, CUT_TEXT = {"train": 16_000_000, "dev": 200_000, "heldout": 200_000, "domain": 100_000}, 600_000
REPEATED = 0.05  # share of the pages of a source that repeat a line that is left out


def documents(
    folder: str, pattern: str, most: int, root: Path, read: Callable[[str], str] = str, avoid: str = r"$^"
) -> Iterator[Document]:
    """About `most` MB of the texts of a folder, without the lines that many of them repeat."""
    texts, size = [], 0
    for text in files(root / folder, pattern, avoid, mixed=True):
        texts.append(read(text).replace("\r\n", "\n"))
        size += len(texts[-1])
        if size > most * MEGABYTE:
            break
    lines = Counter(line for text in texts for line in {line.strip() for line in text.split("\n")} if len(line) > 2)
    often = {line for line, count in lines.items() if count > max(3, REPEATED * len(texts))}
    return by_hash("\n".join(line for line in text.split("\n") if line.strip() not in often) for text in texts)


def source(package: str, title: str, licence: str, most: int, folder: str, pattern: str, **options) -> tuple:
    """A row as those of `debian_text.SOURCES`. A reader gives more than is taken, as some documents are left out."""
    return package, title, licence, most, partial(documents, folder, pattern, round(1.6 * most), **options)


def pages(package: str, title: str, licence: str, most: int, folder: str, avoid: str = r"$^") -> tuple:
    return source(package, title, licence, most, folder, r"\.html(\.en)?$", read=page, avoid=avoid)


DOC = "usr/share/doc"
INDEX = r"(^|/)(genindex|search|index|doc-index.*|.*-tree|.*_toc|.*-use|overview-.*)\.html$"
SOURCES = debian_text.SOURCES | {
    "linux_documentation": source(
        "linux-doc-6.1", "documentation of Linux 6.1", "GPL-2", 26, f"{DOC}/linux-doc-6.1/Documentation",
        r"\.(rst|txt)(\.gz)?$", avoid="translations/",
    ),
    "freebsd_manual": source(
        "freebsd-manpages", "manual pages of FreeBSD", "BSD", 4, "usr/share/man", r"\.gz$", read=manual
    ),
    "handbook": pages(
        "debian-handbook", "The Debian Administrator's Handbook", "GPL-2+ or CC-BY-SA-3.0", 4,
        f"{DOC}/debian-handbook/html/en-US",
    ),
    "reference": pages("debian-reference-en", "Debian Reference", "GPL-2+", 3, "usr/share/debian-reference"),
    "policy": source("debian-policy", "Debian Policy", "GPL-2+", 2, f"{DOC}/debian-policy", r"\.txt(\.gz)?$"),
    "anarchism": pages("anarchism", "An Anarchist FAQ", "GPL-2", 8, f"{DOC}/anarchism"),
    "git": source("git-doc", "documentation of Git", "GPL-2", 5, f"{DOC}/git-doc", r"\.(txt|adoc)$"),
    "cmake": source("cmake-doc", "documentation of CMake", "BSD-3-Clause", 5, f"{DOC}/cmake-data", r"\.rst\.txt$"),
    "apache": pages("apache2-doc", "documentation of Apache httpd", "Apache-2.0", 6, f"{DOC}/apache2-doc/manual/en"),
    "sqlite": pages("sqlite3-doc", "documentation of SQLite", "public domain", 10, f"{DOC}/sqlite3"),
    "django_documentation": pages(
        "python-django-doc", "documentation of Django", "BSD-3-Clause", 9, f"{DOC}/python-django-doc", INDEX
    ),
    "sqlalchemy": pages(
        "python-sqlalchemy-doc", "documentation of SQLAlchemy", "MIT", 9, f"{DOC}/python-sqlalchemy-doc", INDEX
    ),
    "sphinx": source("sphinx-doc", "documentation of Sphinx", "BSD-2-Clause", 3, f"{DOC}/sphinx-doc", r"\.(txt|rst)$"),
    "scipy": pages("python-scipy-doc", "documentation of SciPy", "BSD-3-Clause", 12, f"{DOC}/python-scipy-doc", INDEX),
    "scikit": source(
        "python-sklearn-doc", "documentation of scikit-learn", "BSD-3-Clause", 8, f"{DOC}/python-sklearn-doc",
        r"\.rst\.txt$",
    ),
    "pandas": pages(
        "python-pandas-doc", "documentation of pandas", "BSD-3-Clause", 12, f"{DOC}/python-pandas-doc", INDEX
    ),
    "sympy_documentation": source(
        "python-sympy-doc", "documentation of SymPy", "BSD-3-Clause", 5, f"{DOC}/python-sympy-doc",
        r"\.(rst|md)\.txt$",
    ),
    "pytest": source(
        "python-pytest-doc", "documentation of pytest", "MIT", 3, f"{DOC}/python-pytest-doc", r"\.rst\.txt$"
    ),
    "buildbot": source("buildbot-doc", "documentation of Buildbot", "GPL-2", 3, f"{DOC}/buildbot", r"\.rst\.txt$"),
    "llvm": source(
        "llvm-14-doc", "documentation of LLVM 14", "Apache-2.0 with LLVM exception", 9, f"{DOC}/llvm-14-doc",
        r"\.(rst|md)\.txt$",
    ),
    "erlang": pages("erlang-doc", "documentation of Erlang/OTP", "Apache-2.0", 14, f"{DOC}/erlang-doc", INDEX),
    "rust": pages("rust-doc", "documentation of Rust", "MIT or Apache-2.0", 24, f"{DOC}/rust-doc", r"/src/|macro\."),
    "java": pages(
        "openjdk-17-doc", "documentation of OpenJDK 17", "GPL-2 with Classpath exception", 24,
        f"{DOC}/openjdk-17-jre-headless", INDEX + r"|/class-use/|package-",
    ),
    "haskell": pages("ghc-doc", "documentation of GHC", "BSD-3-Clause", 10, f"{DOC}/ghc-doc", INDEX + r"|/src/"),
    "boost": pages("libboost1.74-doc", "documentation of Boost", "BSL-1.0", 8, f"{DOC}/libboost1.74-doc", INDEX),
    "octave": pages("octave-doc", "documentation of GNU Octave", "GPL-3+", 5, f"{DOC}/octave", INDEX),
    "maxima": pages(
        "maxima-doc", "documentation of Maxima", "GPL-2+", 6, f"{DOC}/maxima-doc/html", r"/(de|es|pt|ja|ru)[^/]*/"
    ),
    "lilypond": pages(
        "lilypond-doc-html", "documentation of LilyPond", "GFDL-1.3+", 8, f"{DOC}/lilypond",
        r"\.(ca|cs|de|es|fr|hu|it|ja|nl|pt|zh)\.html$|-big-page",
    ),
    "vim": pages("vim-doc", "documentation of Vim", "Vim", 8, f"{DOC}/vim"),
    "node": pages("nodejs-doc", "documentation of Node.js", "MIT", 6, f"{DOC}/nodejs", r"(^|/)all\.html$"),
    "shorewall": pages("shorewall-doc", "documentation of Shorewall", "GFDL-1.2", 6, f"{DOC}/shorewall-doc"),
    "gimp": pages("gimp-help-en", "help of GIMP", "GFDL-1.2+", 4, "usr/share/gimp/2.0/help/en"),
    "kerberos": pages("krb5-doc", "documentation of MIT Kerberos", "MIT", 4, f"{DOC}/krb5-doc", INDEX),
    "exim": pages("exim4-doc-html", "documentation of Exim", "GPL-2+", 3, f"{DOC}/exim4-doc-html"),
    "zsh": pages("zsh-doc", "documentation of Zsh", "MIT", 3, f"{DOC}/zsh-common", INDEX),
    "jargon": source("jargon-text", "The Jargon File", "public domain", 2, f"{DOC}/jargon-text", r"\.txt(\.gz)?$"),
}  # fmt: skip


def main(
    tokenizer: Annotated[Path, typer.Option(help="folder of the teacher")],
    out: Annotated[Path, typer.Option(help="folder for the token files")],
    record: Annotated[Path, typer.Option(help="JSON file for sources, licences and hashes")],
    packages: Annotated[Path | None, typer.Option(help="folder that keeps the packages, for another run")] = None,
    cut: Annotated[bool, typer.Option(help="write only what the published runs have read")] = False,
    most: Annotated[int, typer.Option(help="largest number of documents of a split, for a test")] = 10**9,
    only: Annotated[list[str], typer.Option(help="sources to read, for a test; repeatable")] = tuple(SOURCES),
) -> None:
    """Collect, split and tokenize the texts."""
    out.mkdir(parents=True, exist_ok=True)
    chosen = {name: SOURCES[name] for name in only}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if packages is None else packages
        names = [source[0] for source in chosen.values()] + debian_text.FURTHER_PACKAGES
        versions = fetch_text.unpack(names, folder)
        splits, sizes = debian_text.collect(folder / "root", chosen, SHORTEST)
    reader = AutoTokenizer.from_pretrained(tokenizer)
    report = {"sources": debian_text.record_of(chosen, versions, sizes), "files": {}}
    for split, found in splits.items():
        texts = [text for _, text in found[:most]]
        if not texts:
            continue
        tokens = debian_text.tokens_of(reader, texts, reader.convert_tokens_to_ids(END))
        numpy.save(out / f"{split}.npy", tokens[: CUT[split]] if cut else tokens)
        report["files"][f"{split}.npy"] = debian_text.file_record(tokens, texts)
        if split != "train":
            (out / f"{split}.txt").write_text(
                f"\n{END}\n".join(texts)[: CUT_TEXT if cut else TEXT_SIZE], encoding="utf-8"
            )
        for name, count in _tokens_by_source(found[:most], tokens, reader.convert_tokens_to_ids(END)).items():
            report["sources"][name].setdefault("tokens", {})[split] = count
        print(split, report["files"][f"{split}.npy"], flush=True)
    write_json(record, report, indent=2)


def _tokens_by_source(found: list[Document], tokens: numpy.ndarray, end: int) -> Counter:
    """The tokens of each source in a stream of documents, each of which is followed by `end`."""
    stops = numpy.flatnonzero(tokens == end) + 1
    lengths = numpy.diff(stops, prepend=0)
    counts = Counter()
    for (name, _), length in zip(found, lengths.tolist(), strict=True):
        counts[name] += length
    return counts


if __name__ == "__main__":
    typer.run(main)
