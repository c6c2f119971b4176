"""Texts in Debian packages, of which several experiments make a corpus: sources, readers, splits, tokens, record.

Documents are split by the hash of their content (novels by chapter, scripture by book) into training, development and
held-out text, so that a document is in the same split of every corpus. Collecting needs apt, dpkg and network access
to a Debian mirror.
"""

import gzip
import hashlib
import html
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy

from hf_memmix.training.experiments.bundled import fetch_text

Document = tuple[str, str]  # (split, text)
END = fetch_text.SEPARATOR
SPLITS = ("train", "dev", "heldout", "domain")
PERIOD = 40  # of 40 documents, one is development text and one is held out
LONGEST = 200_000  # bytes of a document; longer ones are cut, so that no file fills a split
MEGABYTE = 1_000_000


def split_of(text: str) -> str:
    """The split of a document, from the hash of its content."""
    return {0: "heldout", 1: "dev"}.get(int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % PERIOD, "train")


def by_hash(texts: Iterator[str]) -> Iterator[Document]:
    return ((split_of(text), text) for text in texts)


def files(root: Path, pattern: str, avoid: str = r"$^", mixed: bool = False) -> Iterator[str]:
    """The texts of all UTF-8 files below `root` whose path matches `pattern` and not `avoid`; .gz is unpacked.

    mixed: in a random order, which is always the same, in place of that of the names.
    """
    paths = sorted(root.rglob("*"))
    if mixed:
        random.Random(0).shuffle(paths)
    for path in paths:
        name = str(path.relative_to(root))
        if re.search(pattern, name) and not re.search(avoid, name) and path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            data = gzip.decompress(data) if path.suffix == ".gz" else data
            try:
                yield data.decode("utf-8")
            except UnicodeDecodeError:
                continue


def dictionary(root: Path) -> Iterator[str]:
    """Pages of 60 entries each of the dictionary, without lines that only name an edition."""
    with gzip.open(root / "usr/share/dictd/gcide.dict.dz") as file:
        text = file.read().decode("utf-8", "replace")
    text = re.sub(r"\n *\[[^\]\n]*(?:Webster|WordNet|PJC)[^\]\n]*\]", "", text)
    entries = re.split(r"\n(?=\S[^\n]*\\)", text)[1:]
    for start in range(0, len(entries), 60):
        yield "\n".join(entry.strip("\n") for entry in entries[start : start + 60])


def manual(text: str) -> str:
    """A manual page without the marks of roff."""
    lines = []
    for line in text.split("\n"):
        if re.match(
            r"['.]\\\"|\.(TH|nf|fi|PP|RS|RE|TP|IP|in|ft|ie|el|if|\\|EX|EE|ad|hy|ne|sp|br|PD|TQ|UE|ME)\b", line
        ):
            continue
        mark = re.match(r"\.(SH|SS|BI|BR|RB|IR|RI|IB|SM|SB|UR|MT|B|I)\b ?(.*)", line)
        if mark and mark[1] in ("BI", "BR", "RB", "IR", "RI", "IB"):  # words in two typefaces in turn, without spaces
            line = "".join(quoted or word for quoted, word in re.findall(r'"([^"]*)"|(\S+)', mark[2]))
        elif mark:
            line = f"\n{mark[2]}" if mark[1] in ("SH", "SS") else mark[2].replace('"', "")
        elif line.startswith("."):
            continue
        line = re.sub(r"\\f[A-Z]|\\f\(..|\\[&|/,]", "", line)
        lines.append(re.sub(r"\\\(..|\\\[..\]", "", line.replace("\\-", "-").replace("\\e", "\\")))
    return "\n".join(lines).strip()


def page(text: str) -> str:
    """The visible text of an HTML page."""
    text = re.sub(r"(?s)<head>.*?</head>|<div class=\"nav(?:header|footer)\">.*?</table>", "", text)
    text = re.sub(r"(?i)</?(?:p|div|h\d|pre|table|tr|li|dt|dd|br)\b[^>]*>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text)).replace("\u00a0", " ")
    return re.sub(r"\n[ \t]*\n\s*", "\n\n", text).strip()


NO_TESTS = r"_test\.go$|/testdata/|/tests?/|/vendor/|zerrors_|zsyscall_|ztypes_|zsysnum_|/tables\.go|rewrite\w+\.go"
# name: packages, what it is, its licence, the most bytes that are taken, and its reader
SOURCES = {
    "austen": ("r-cran-janeaustenr", "novels of Jane Austen", "public domain", 9, fetch_text.austen),
    "melville": ("r-cran-tokenizers", "Moby Dick by Herman Melville", "public domain", 9, fetch_text.melville),
    "kjv": ("bible-kjv-text", "the Bible, King James Version", "public domain", 9, fetch_text.kjv),
    "henry": ("sword-comm-mhcc", "Matthew Henry's Concise Commentary", "public domain", 9, fetch_text.henry),
    "spurgeon": ("sword-comm-tdavid", "Spurgeon: The Treasury of David", "public domain", 9, fetch_text.spurgeon),
    "gcide": (
        "dict-gcide", "Collaborative International Dictionary of English", "GPL-3+", 14,
        lambda root: by_hash(dictionary(root)),
    ),
    "python_documentation": (
        "python3.11-doc", "documentation of Python 3.11 (reStructuredText)", "PSF-2.0", 12,
        lambda root: by_hash(files(root, r"python3\.11/html/_sources/.*\.rst\.txt$")),
    ),
    "perl_documentation": (
        "perl-doc", "documentation of Perl 5.36 (POD)", "Artistic or GPL-1+", 8,
        lambda root: by_hash(files(root, r"share/perl/5[^/]*/.*\.pod$")),
    ),
    "manual_pages": (
        "manpages", "Linux manual pages", "GPL-2+, BSD, MIT and Linux-man-pages-copyleft, per page", 5,
        lambda root: by_hash(manual(text) for text in files(root, r"usr/share/man/man\d/.*\.gz$")),
    ),
    "emacs_lisp": (
        "emacs-el", "source of GNU Emacs 28 (Emacs Lisp)", "GPL-3+", 12,
        lambda root: by_hash(files(root, r"share/emacs/.*\.el\.gz$", r"/(leim|international|loaddefs)")),
    ),
    "go": (
        "golang-1.19-src", "source of Go 1.19", "BSD-3-Clause", 16,
        lambda root: by_hash(files(root, r"go-1\.19/src/.*\.go$", NO_TESTS)),
    ),
    "python_library": (
        "libpython3.11-stdlib", "standard library of Python 3.11", "PSF-2.0", 9,
        lambda root: by_hash(files(root, r"usr/lib/python3\.11/.*\.py$")),
    ),
    "sympy": (
        "python3-sympy", "source of SymPy 1.11 (Python)", "BSD-3-Clause", 8,
        lambda root: by_hash(files(root, r"dist-packages/sympy/.*\.py$", r"/tests/|rubi/|_parser|antlr")),
    ),
    "django": (
        "python3-django", "source of Django 3.2 (Python)", "BSD-3-Clause", 5,
        lambda root: by_hash(files(root, r"dist-packages/django/.*\.py$", r"/locale/")),
    ),
    "postgresql_documentation": (
        "postgresql-doc-15", "documentation of PostgreSQL 15", "PostgreSQL", 9,
        lambda root: (("domain", page(text)) for text in files(root, r"postgresql-doc-15/html/.*\.html$")),
    ),
}  # fmt: skip
FURTHER_PACKAGES = ["bible-kjv", "manpages-dev"]  # the reader of bible-kjv-text; more pages of "manual_pages"


def collect(root: Path, sources: dict, shortest: int) -> tuple[dict[str, list[Document]], dict[str, dict[str, int]]]:
    """Pairs (source, text) of each split in an order that mixes all sources, and the bytes of each source and split.

    shortest: characters of a document; shorter ones are left out, and so are documents that occurred before.
    """
    splits, sizes, known = {split: [] for split in SPLITS}, {}, set()
    for name, (_, _, _, limit, read) in sources.items():
        documents = list(read(root))
        random.Random(name).shuffle(documents)
        taken = dict.fromkeys(SPLITS, 0)
        for split, text in documents:
            text = text.replace(END, "")[:LONGEST].strip()
            key = hashlib.sha256(text.encode()).digest()
            if len(text) < shortest or key in known:
                continue
            if sum(taken.values()) > limit * MEGABYTE:
                break
            known.add(key)
            splits[split].append((name, text))
            taken[split] += len(text.encode())
        sizes[name] = {split: size for split, size in taken.items() if size}
        print(name, sizes[name], flush=True)
    for documents in splits.values():
        random.Random(0).shuffle(documents)
    return splits, sizes


def tokens_of(tokenizer, documents: list[str], end: int) -> numpy.ndarray:
    """The tokens of all documents as one stream, uint16, each document followed by the token `end`."""
    stream = []
    for start in range(0, len(documents), 64):
        batch = tokenizer(documents[start : start + 64], add_special_tokens=False, verbose=False)["input_ids"]
        stream += [numpy.asarray([*ids, end], dtype=numpy.uint16) for ids in batch]
    return numpy.concatenate(stream)


def record_of(sources: dict, versions: dict[str, str], sizes: dict[str, dict[str, int]]) -> dict[str, dict]:
    """For each source its package, version, title and licence, and the bytes that were taken."""
    return {
        name: {
            "package": package,
            "version": versions.get(package),
            "title": title,
            "licence": licence,
            "bytes": sizes[name],
        }
        for name, (package, title, licence, _, _) in sources.items()
    }


def file_record(tokens: numpy.ndarray, documents: list[str]) -> dict:
    """Sizes and hash of a token file."""
    text_bytes = sum(len(text.encode()) for text in documents)
    return {
        "documents": len(documents),
        "bytes": text_bytes,
        "tokens": len(tokens),
        "bytes_per_token": round(text_bytes / len(tokens), 3),
        "sha256": hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest(),
    }
