"""Training steps of sequences that are split over several processes, beside those of one process. The ranks of
tests/core/test_context_parallel.py call `main`; for errors, copies of a test's process call `measure`.

Every process computes a case alone first, and then its part in torch's `context_parallel`. Rank 0 writes the largest
difference of loss and gradients per case, or the text of its error, as JSON. It also checks that the processes would
not wait for each other forever where every message waits for its receiver, as on GPUs (NCCL): gloo does not wait.
"""

import contextlib
import copy
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor.experimental import context_parallel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_memmix.context_parallel import current_group, keep_order
from testing import base_model, build, difference, distinct_ids, tiny_config

TOKENS = 96  # pieces of 24 and 16 tokens on two and three ranks that hold two each
ALL = (0, 1)


@contextlib.contextmanager
def recorded():
    """A list of what this process sends, receives and computes together with all others: operation, peer, tensor."""
    steps, originals = [], {name: getattr(dist, name) for name in ("isend", "recv", "all_gather", "all_reduce")}

    def recording(name, operation):
        def call(*args, **kwargs):
            messages = name in ("isend", "recv")
            tensor = args[1] if name == "all_gather" else args[0]
            steps.append((name, args[1] if messages else None, tuple(tensor.shape), str(tensor.dtype)))
            assert tensor.is_contiguous()
            return operation(*args, **kwargs)

        return call

    for name, operation in originals.items():
        setattr(dist, name, recording(name, operation))
    try:
        yield steps
    finally:
        for name, operation in originals.items():
            setattr(dist, name, operation)


def check_meetings(steps: list[list[tuple]]):
    """Raise ValueError if the processes stop each other where each step waits for the same step of its partners.

    steps: those of every rank, in its order.
    """
    at = [0] * len(steps)
    while True:
        now = [mine[i] if i < len(mine) else None for mine, i in zip(steps, at, strict=True)]
        ready = []
        for rank, step in enumerate(now):
            if step is not None and step[0] == "isend" and now[step[1]] == ("recv", rank, *step[2:]):
                ready = [rank, step[1]]
        if now[0] is not None and now[0][1] is None and all(step == now[0] for step in now):
            ready = range(len(now))
        if not ready:
            break
        for rank in ready:
            at[rank] += 1
    if any(step is not None for step in now):
        raise ValueError(f"the processes wait for each other forever: {now}")


def gathered_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Causal attention that gathers all keys: torch's ring attention runs on GPUs only."""
    positions = gathered_attention.positions
    if current_group() is None:
        everywhere = positions
    else:
        key, value = (torch.cat(all_gather(t.contiguous()), 2) for t in (key, value))
        parts = [torch.empty_like(positions) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, positions)
        everywhere = torch.cat(parts)
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.mT * scaling
    scores = scores.masked_fill(positions[:, None] < everywhere, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2), None


def loss_of(model, ids, position_ids, labels, mask=None):
    """The sum of the cross-entropies of labels that are shifted already."""
    gathered_attention.positions = position_ids[0].contiguous()
    logits = model(ids, position_ids=position_ids, attention_mask=mask).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def batch_of(case) -> list[torch.Tensor]:
    """Ids, positions and shifted labels [2, T], and the padding mask if the case has one."""
    ids = distinct_ids(2, TOKENS)
    mask = torch.ones_like(ids)
    kind = case.get("mask")
    if kind == "left":
        mask[0, :29] = 0
    elif kind == "right":
        mask[0, 50:] = 0
    elif kind == "holes":
        mask = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.7).long()
    positions = torch.arange(TOKENS).expand(2, -1).contiguous()
    labels = F.pad(ids.masked_fill(mask == 0, -100), (0, 1), value=-100)[:, 1:].contiguous()
    batch = [ids, positions, labels, mask] if kind else [ids, positions, labels]
    return [t[:, : case.get("tokens", TOKENS)].contiguous() for t in batch]


def model_of(case):
    """The model of a case, in training mode."""
    layout = tuple(case.get("layout", ALL))
    config = tiny_config(
        case.get("family", "llama"), layout, case["mixer"], case.get("options"), num_hidden_layers=len(ALL)
    )
    model = build(config, dtype=getattr(torch, case.get("dtype", "float64"))).train()
    if layout != ALL:
        model.set_attn_implementation(case.get("attention", "sdpa"))
    if "checkpointing" in case:
        model.gradient_checkpointing_enable({"use_reentrant": case["checkpointing"] == "reentrant"})
    if case.get("hooks"):
        _attach_context_parallel_hooks(model)
    if case.get("frozen"):  # what is trained is behind the first mixer
        model.requires_grad_(False)
        for layer in base_model(model).layers[1:]:
            layer.requires_grad_(True)
    return model


def split_step(model, case, mesh) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients of all processes together."""
    buffers = [t.clone() for t in batch_of(case)]
    if case.get("restart"):
        buffers[1] = buffers[1] % case["restart"]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)):
        if case.get("forget_positions"):
            buffers[1] = torch.arange(buffers[0].shape[1]).expand(2, -1)
        if case.get("reversed"):  # each rank holds the second half of its tokens first
            buffers = [t.roll(t.shape[1] // 2, 1) for t in buffers]
        if case.get("generate"):
            model.generate(buffers[0], max_new_tokens=2)
        if case.get("own_mask"):
            length = buffers[0].shape[1]
            own = torch.ones(2, 1, length, length, dtype=torch.bool)
            model(buffers[0], position_ids=buffers[1], attention_mask=own, memmix_mask=None)
        if case.get("labels"):
            model(buffers[0], position_ids=buffers[1], labels=buffers[0])
        if head := case.get("pooled"):
            auto_class = getattr(transformers, f"AutoModelFor{head}")
            auto_class.from_config(model.config)(buffers[0], position_ids=buffers[1])
        loss = loss_of(model, *buffers)
        loss.backward()
    found = {"loss": loss.detach(), **gradients(model)}
    for tensor in found.values():
        dist.all_reduce(tensor)
    return found


def largest_difference(case, mesh) -> float:
    """Of loss and gradients, relative, between all processes and one; computed by the first process."""
    keep_order(not case.get("balanced", False))
    model = model_of(case)
    alone = copy.deepcopy(model)
    with recorded() as mine:
        found = split_step(model, case, mesh)
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, mine)
    check_meetings(steps)
    if dist.get_rank():
        return 0.0
    loss = loss_of(alone, *batch_of(case))
    loss.backward()
    expected = {"loss": loss.detach(), **gradients(alone)}
    assert found.keys() == expected.keys()
    return max(difference(found[name], expected[name]) for name in expected)


def measure(result, *cases):
    """Write what this file says; `cases` are JSON. The process group is there already, and ends."""
    ALL_ATTENTION_FUNCTIONS.register("sdpa", gathered_attention)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    measured = []
    for case in map(json.loads, cases):
        try:
            measured.append(largest_difference(case, mesh))
        except ValueError as error:  # all processes raise it
            measured.append(str(error))
    dist.barrier()
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(measured))
    dist.destroy_process_group()


def main(result, *cases):
    """In every rank of a launch."""
    dist.init_process_group("gloo")
    measure(result, *cases)
