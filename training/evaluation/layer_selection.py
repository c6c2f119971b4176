"""Measures which layers should stay attention. This needs forward passes, but no training for each candidate.

One layer of the teacher at a time is replaced by its mixer. The score of a layer is the loss by this replacement:

    score_l = KL(teacher || teacher with layer l swapped) + weight (nll_l - nll)

where nll is the mean negative log-likelihood of the answers of recall probes. The layers with the highest scores stay
attention. Use aligned mixers: with fresh mixers, the scores measure how close each start is to the attention, not how
much is lost after training.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from hf_memmix._transformers import execution_device
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.logits import logits_head
from hf_memmix.conversion.model_files import check_converted
from hf_memmix.errors import UserError
from hf_memmix.training.evaluation.picture import new_picture, write_picture
from hf_memmix.training.evaluation.probes.material import Sample
from hf_memmix.training.evaluation.probes.score import score
from hf_memmix_kernels._common import exact


@contextlib.contextmanager
def swapped(teacher: nn.Module, student: nn.Module, layers: list[int]) -> Iterator[None]:
    """A context in which the student's mixers compute the outputs of `layers` of the teacher."""
    handles = []

    def hook_for(layer: int):
        mixer = attention_module(student, layer)

        def hook(module, args, kwargs, output):
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            dtype = student.get_input_embeddings().weight.dtype
            mixed = mixer(hidden.to(dtype), position_embeddings=kwargs.get("position_embeddings"))[0]
            return (mixed.to(hidden.dtype), *output[1:])

        return hook

    try:
        for layer in layers:
            handles.append(attention_module(teacher, layer).register_forward_hook(hook_for(layer), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def cost_of_swaps(
    teacher: nn.Module,
    student: nn.Module,
    swaps: list[list[int]],
    blocks: Tensor,
    samples: dict[str, list[Sample]],
    *,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict, list[dict]]:
    """The loss by each set of swapped layers. All layers of a set are swapped at once.

    Args:
        swaps: sets of the student's memory layers.
        blocks: [N, T] token ids for the divergence.
        samples: probes by task, of one length each, for the nll of their answers.

    Returns the teacher's `{"loss", "answers"}` and, for each set, `{"layers", "kl", "loss", "answers"}`: forward KL
    and loss in nats per token, and the mean nll of the answers by task.
    Raises ValueError if a set names a layer that the student has not converted.
    """
    check_converted(student.config.to_dict())
    have = student.config.memory_layers
    if bad := sorted({layer for layers in swaps for layer in layers} - set(have)):
        raise UserError(f"layers {bad} of the student have no mixer; its memory layers are {have}")
    modes = teacher.training, student.training
    teacher.eval(), student.eval()
    try:
        return _costs(teacher, student, swaps, blocks, samples, batch_size, progress)
    finally:
        teacher.train(modes[0]), student.train(modes[1])


def _costs(teacher, student, swaps, blocks, samples, batch_size, progress) -> tuple[dict, list[dict]]:
    head, device = logits_head(teacher), execution_device(teacher.get_input_embeddings())
    rows = [{"layers": list(layers), "kl": 0.0, "loss": 0.0} for layers in swaps]
    base, count = {"loss": 0.0}, blocks[:, 1:].numel()
    batches, done = blocks.split(batch_size), 0
    total = (len(swaps) + 1) * (len(batches) + len(samples))

    def advance():
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    for batch in batches:
        batch = batch.to(device)
        target = _hidden(teacher, batch)
        base["loss"] += text_loss(head, target, batch) / count
        advance()
        for row in rows:
            with swapped(teacher, student, row["layers"]):
                hidden = _hidden(teacher, batch)
            row["kl"] += divergence(head, target, hidden) / count
            row["loss"] += text_loss(head, hidden, batch) / count
            advance()
    for row in [base, *rows]:
        with swapped(teacher, student, row.get("layers", [])):
            row["answers"] = {}
            for task, drawn in samples.items():
                scores = score(teacher, drawn, batch_size, control=False)
                row["answers"][task] = sum(s.nll for s in scores) / len(scores)
                advance()
    return base, rows


def _hidden(model: nn.Module, batch: Tensor) -> Tensor:
    return model.base_model(input_ids=batch, use_cache=False).last_hidden_state


def text_loss(head, hidden: Tensor, batch: Tensor) -> float:
    """Sum of the nll; logits of one row at a time. The GPU is read once, because each reading waits for it."""
    losses = []
    for h, ids in zip(hidden, batch, strict=True):
        logits = head(h[:-1]).float()
        losses.append(nn.functional.cross_entropy(logits, ids[1:].to(logits.device), reduction="sum"))
    return exact(torch.stack(losses)).sum().item()


def divergence(head, target: Tensor, hidden: Tensor) -> float:
    """Sum of the forward KL over predicted tokens."""
    totals = []
    for theirs, ours in zip(target, hidden, strict=True):
        logp, logq = (head(h[:-1]).float().log_softmax(-1) for h in (theirs, ours))
        totals.append((logp.exp() * (logp - logq)).sum())
    return exact(torch.stack(totals)).sum().item()


def rank_layers(teacher, student, blocks: Tensor, samples: dict[str, list[Sample]], *, weight=1.0, **options) -> dict:
    """Score the student's memory layers one by one; options as in `cost_of_swaps`.

    Returns:
        `{"teacher", "layers"}`, with rows `{"layer", "kl", "answers", "nll", "score", "rank"}` in the order of layers.
        `nll` is the increase of the answers' nll, averaged over tasks. The layer with the highest score has rank 1.
    """
    if not weight >= 0:
        raise UserError(f"the weight of the answers is {weight}; it must be at least 0")
    layers = student.config.memory_layers
    base, costs = cost_of_swaps(teacher, student, [[layer] for layer in layers], blocks, samples, **options)
    rows = []
    for layer, cost in zip(layers, costs, strict=True):
        rises = [cost["answers"][task] - base["answers"][task] for task in samples]
        nll = sum(rises) / len(rises) if rises else 0.0
        rows.append({"layer": layer, "kl": cost["kl"], "answers": cost["answers"], "nll": nll})
        rows[-1]["score"] = cost["kl"] + weight * nll
        if not math.isfinite(rows[-1]["score"]):
            raise UserError(
                f"the score of layer {layer} is not finite; its mixer is broken or has diverged, give another student"
            )
    for rank, row in enumerate(sorted(rows, key=lambda row: -row["score"]), 1):
        row["rank"] = rank
    return {"teacher": base, "layers": rows}


def choose(ranking: dict, keep: float | int, num_layers: int) -> list[int]:
    """The layers with the highest scores. `keep`: their number, or a fraction of `num_layers` (at least one layer).

    Raises:
        ValueError: `keep` is not smaller than the number of ranked layers.
    """
    rows = sorted(ranking["layers"], key=lambda row: row["rank"])
    return sorted(row["layer"] for row in rows[: count_of(keep, num_layers, len(rows))])


def lost_answers(ranking: dict, keep: list[int]) -> tuple[int, float] | None:
    """The layer whose replacement costs the most answers, if it is not in `keep`, and the least weight that keeps it.

    With as many layers as in `keep`. None if that layer is kept, or if no replacement costs answers.
    """
    worst = max(ranking["layers"], key=lambda row: row["nll"])
    if not keep or worst["layer"] in keep or worst["nll"] <= 0:
        return None
    # another layer stays ahead up to the weight at which both scores are equal
    others = [row for row in ranking["layers"] if row["nll"] < worst["nll"]]
    ahead = sorted(((row["kl"] - worst["kl"]) / (worst["nll"] - row["nll"]) for row in others), reverse=True)
    return (worst["layer"], max(0.0, ahead[len(keep) - 1])) if len(ahead) >= len(keep) else None


def count_of(keep: float | int, num_layers: int, ranked: int) -> int:
    """The number of layers that `choose` returns; `ranked`: the number of ranked layers. Errors as in `choose`."""
    count = keep if isinstance(keep, int) else max(1, round(keep * num_layers))
    if not 1 <= count < ranked or (isinstance(keep, float) and not 0 < keep < 1):
        raise UserError(f"keep is {keep}; give a number from 1 to {ranked - 1}, or a fraction between 0 and 1")
    return count


def plot_ranking(plan: dict, path) -> None:
    """Draw the plan of `memmix select` as a PNG: the two parts of each layer's score; kept layers have solid bars."""
    from matplotlib.patches import Rectangle

    rows, kept = plan["layers"], set(plan["keep"])
    weight = plan["settings"]["weight"]
    figure, axes = new_picture(figsize=(max(4, 0.35 * len(rows) + 2), 3.2))
    for part, color, shift in (("kl", "#2f6fa7", -0.2), ("nll", "#b5485d", 0.2)):
        for row in rows:
            value = row[part] * (weight if part == "nll" else 1)
            axes.bar(row["layer"] + shift, value, 0.4, color=color, alpha=1 if row["layer"] in kept else 0.35)
    axes.set_xticks([row["layer"] for row in rows])
    axes.set_xlabel("layer handed over to the mixer")
    axes.set_ylabel("nats")
    names = ("KL to the teacher, a token", f"{weight:g} x rise of the nll of answers")
    colors = ("#2f6fa7", "#b5485d")
    axes.legend([Rectangle((0, 0), 1, 1, color=color) for color in colors], names, frameon=False, fontsize=8)
    axes.set_title(f"{plan['mixer']}: layers {', '.join(map(str, plan['keep']))} stay attention", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    write_picture(figure, path)
