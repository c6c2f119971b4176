"""The teacher's distribution on disk: for every token, the k largest log-probabilities and that of all other tokens.

    6 k + 4 bytes per token: fp16 log-probabilities and int32 ids [rows, T, k], fp32 rest [rows, T]

`memmix cache-teacher` writes it in one pass of the teacher over the rows. A `distill` run with `teacher: cache:DIR`
then needs no teacher in memory. Rows are read from memory-mapped safetensors files. The folder stores the hashes of
data, tokenizer and teacher, and the teacher's configuration; a run with others is refused. It also stores the hashes
of its own files, which every run compares at its start.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from hf_memmix import launch
from hf_memmix.conversion.families import decoder_layers
from hf_memmix.conversion.hashes import check_files, file_hash, read_sealed, teacher_hash, write_sealed
from hf_memmix.conversion.loading import check_finite_weights, read_config, read_json
from hf_memmix.conversion.logits import logits_head
from hf_memmix.conversion.model_files import check_transformer
from hf_memmix.conversion.records import write_json
from hf_memmix.conversion.saving import explain_write_errors, place_of, remove_folder, replace_folder
from hf_memmix.conversion.written import mark_folder
from hf_memmix.errors import UserError
from hf_memmix.layout_hooks import separate_documents
from hf_memmix.padding import packing_of
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.losses import top_k_of
from hf_memmix.training.run_identity import config_of, differences
from hf_memmix.training.run_lock import PARTIAL_FILE, run_folder

META_FILE = "teacher_cache.json"
FORMAT = 2  # 1: without hashes of its files, of texts without the tokens that the tokenizer puts before a document
AGAIN = "write the cache with memmix cache-teacher"
READ = ("input_ids", "position_ids")  # what the teacher reads of a row
TENSORS = ("log_probs", "ids", "log_rest")


@torch.no_grad()
def write_cache(
    teacher: nn.Module,
    data: TokenBlocks,
    folder: str | Path,
    k: int = 32,
    *,
    teacher_id: str | None = None,
    batch_size: int = 8,
    chunk_tokens: int = 2048,
    shard_rows: int = 1024,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Run the teacher over all rows and write its k largest probabilities into `folder`; returns the cache's settings.

    Files are written to a folder beside `folder`, which is renamed at the end. After a kill, the same call continues
    after the last complete file.

    Args:
        k: number of probabilities per token.
        teacher_id: `teacher_hash` of the teacher's folder; default: the hash of the model's tensors.
        batch_size: rows that are computed together.
        chunk_tokens: number of tokens whose logits are in memory at a time.
        shard_rows: rows per file.
        progress: `progress(done, total)` is called after every batch.

    Raises:
        ValueError: the data is a stream, tokens are outside the vocabulary, k is not in 1 to V, or the teacher is
            itself converted, has weights that are not finite, or would attend across packed documents.
    """
    if not isinstance(data, TokenBlocks):
        raise UserError("a teacher cache cannot be made from streamed data; set stream: false")
    data.check_vocabulary(teacher.config.vocab_size)
    check_transformer(teacher.config.to_dict())
    check_finite_weights(teacher, "the teacher")
    meta = {
        "format": FORMAT,
        "k": k,
        "rows": len(data),
        "block_size": data.block_size,
        "shard_rows": shard_rows,
        "data": data.fingerprint(),
        "tokenizer": data.tokenizer,
        "teacher": teacher_id or teacher_hash(teacher),
        "config": config_of(teacher.config),
        "dtype": str(teacher.dtype),
    }
    teacher.eval()
    head, device = logits_head(teacher), teacher.get_input_embeddings().weight.device
    remedy = f"It needs {len(data) * data.block_size * (6 * k + 4):,} bytes; make room and run the same again to go on"
    # these settings change the last bits of the numbers, so one cache must not mix them
    how = {"batch_size": batch_size, "chunk_tokens": chunk_tokens, "device": device.type}
    with explain_write_errors(folder, remedy), run_folder(folder, overwrite=overwrite) as work:
        done = _finished_files(work, meta | how)
        if not done:
            remove_folder(work, beside=place_of(folder))
        for first in range(0, len(data), shard_rows):
            last, name, parts = min(first + shard_rows, len(data)), _shard_name(first // shard_rows), []
            if name in done:
                continue
            for start in range(first, last, batch_size):
                rows = [data[i] for i in range(start, min(start + batch_size, last))]
                inputs = {
                    name: torch.stack([row[name] for row in rows]).to(device) for name in READ if name in rows[0]
                }
                boundaries = packing_of(None, None, inputs.get("position_ids"), *inputs["input_ids"].shape)
                with separate_documents(decoder_layers(teacher), boundaries):
                    hidden = teacher.base_model(**inputs, use_cache=False).last_hidden_state
                parts.append(_top_k(head, hidden, k, chunk_tokens))
                if progress is not None:
                    progress(start + len(rows), len(data))
            tensors = {name: torch.cat(column) for name, column in zip(TENSORS, zip(*parts, strict=True), strict=True)}
            work.mkdir(exist_ok=True)
            save_file(tensors, work / name)
            done[name] = file_hash(work / name)
            write_json(work / PARTIAL_FILE, meta | how | {"files": done})
        write_sealed(work / META_FILE, meta | {"files": done})
        (work / PARTIAL_FILE).unlink()
        mark_folder(work)
        replace_folder(work, place_of(folder))
    return meta


def _finished_files(work: Path, settings: dict) -> dict[str, str]:
    """Names and hashes of the complete files of an interrupted cache with the same settings."""
    try:
        record = json.loads((work / PARTIAL_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    files = record.pop("files", {})
    if record != settings:
        return {}
    return {
        name: value for name, value in files.items() if (work / name).is_file() and file_hash(work / name) == value
    }


def _top_k(head, hidden: Tensor, k: int, chunk_tokens: int) -> tuple[Tensor, ...]:
    """`top_k_of` for hidden states [B, T, d], in the dtypes of the file."""
    parts = [top_k_of(head(chunk), k) for chunk in hidden.flatten(0, 1).split(chunk_tokens)]
    columns = (torch.cat(column).unflatten(0, hidden.shape[:2]).cpu() for column in zip(*parts, strict=True))
    return tuple(x.to(dtype) for x, dtype in zip(columns, (torch.float16, torch.int32, torch.float32), strict=True))


def _read_meta(folder: Path) -> dict:
    """The settings of a cache. Raises ValueError if the file was changed, or another version wrote it."""
    known = read_json(folder / META_FILE).get("format")
    if known != FORMAT:
        raise UserError(
            f"the teacher cache {str(folder)!r} has format {known!r}, not {FORMAT}, in which files have hashes and"
            f" documents begin as the tokenizer begins them (BOS); {AGAIN}"
        )
    return read_sealed(folder / META_FILE, AGAIN)


def _is_hash(teacher) -> bool:
    """Whether a teacher is given by its `teacher_hash`."""
    return isinstance(teacher, str) and ":" in teacher


def _shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


class CachedBlocks(Dataset):
    """Rows of `data` with the teacher's `teacher_log_probs`, `teacher_ids` [T, k] and `teacher_log_rest` [T].

    teacher: folder, model or `teacher_hash` that the cache must belong to; None: this is not checked.

    Raises:
        ValueError: the cache is broken, or belongs to other data, another tokenizer or another teacher.
    """

    def __init__(self, data: TokenBlocks, folder: str | Path, teacher=None):
        self.data, self.folder = data, Path(folder)
        if not (self.folder / META_FILE).is_file():
            raise UserError(f"{str(folder)!r} is no teacher cache (no {META_FILE}); {AGAIN}")
        if not isinstance(data, TokenBlocks):
            raise UserError("a teacher cache cannot be used with streamed data; set stream: false")
        self.meta = _read_meta(self.folder)
        found = {"data": data.fingerprint(), "tokenizer": data.tokenizer}
        if teacher is not None:
            found["teacher"] = teacher if _is_hash(teacher) else teacher_hash(teacher)
        for name, value in found.items():
            known = self.meta.get(name)
            if known != value and not (name == "tokenizer" and "" in (known, value)):
                what = "other data" if name == "data" else f"another {name}"
                raise UserError(
                    f"the teacher cache {str(folder)!r} was made with {what} ({known}, not {value}); write it again"
                    " for these files, block size, packing, drills, tokenizer and teacher"
                )
        self._check_config(teacher)
        if launch.is_first():  # if rank 0 fails, the launcher ends the other processes
            check_files(self.folder, self.meta["files"], AGAIN)
        self._shards: dict[int, object] = {}

    def _check_config(self, teacher) -> None:
        """Raise ValueError if the teacher's config.json was changed since: it says how the weights compute."""
        known = self.meta["config"]
        if teacher is None or _is_hash(teacher):
            return
        config = teacher.config if isinstance(teacher, nn.Module) else read_config(teacher)
        if different := "; ".join(differences(known, config_of(config), "config.")):
            raise UserError(
                f"the teacher cache {str(self.folder)!r} was made with another config.json of the teacher"
                f" ({different}); write it again"
            )

    @property
    def block_size(self) -> int:
        return self.data.block_size

    @property
    def loss(self) -> str:
        return self.data.loss

    @property
    def drills(self) -> float:
        return self.data.drills

    def check_vocabulary(self, size: int) -> None:
        """As `TokenBlocks.check_vocabulary`."""
        self.data.check_vocabulary(size)

    def document_lengths(self) -> Tensor:
        """As `TokenBlocks.document_lengths`."""
        return self.data.document_lengths()

    def fingerprint(self) -> str:
        """The fingerprint of the rows, the hash of the teacher, k, and the dtype in which the teacher computed.

        A run on the cache of one dtype does not go on with that of another.
        """
        return " ".join(map(str, (self.data.fingerprint(), *(self.meta[name] for name in ("teacher", "k", "dtype")))))

    def __getstate__(self) -> dict:
        """A process that reads rows for the Trainer, and is not forked, opens the files itself."""
        return vars(self) | {"_shards": {}}

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        shard, row = divmod(index, self.meta["shard_rows"])
        if shard not in self._shards:
            path = self.folder / _shard_name(shard)
            try:
                self._shards[shard] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{str(path)!r} is missing or broken ({error}); write the cache again") from None
        file = self._shards[shard]
        return self.data[index] | {f"teacher_{name}": file.get_slice(name)[row] for name in TENSORS}
