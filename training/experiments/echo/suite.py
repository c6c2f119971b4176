"""Echo's models of a million parameters, their training on a task of `tasks.py`, and their measurement.

The three models have 4 layers. The outer two are Mamba-2; the inner two are Mamba-2, softmax attention or SKA. A model
answers with the most likely of the 50 values, so chance is 2 %.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memmix import EchoConfig, EchoForCausalLM
from hf_memmix.mixers import ATTENTION
from hf_memmix.mixers.ska import SKAMixer
from hf_memmix.swap import memory_mixers
from hf_memmix.training.experiments.common.fit import autocast, fit
from hf_memmix.training.experiments.common.harness import device
from hf_memmix.training.experiments.common.mqar import TEST_SEED
from hf_memmix.training.experiments.echo.tasks import TASKS, VALUES, Examples, draw_examples, mixture

MODELS = {
    "ssm": {"num_ska_layers": 0},
    "attention": {"num_ska_layers": 0, "attention_layers": [1, 2]},
    "ska": {},
}
TRAINED = ("system_prompt", "tool_trace")
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
PAIRS = (2, 4, 8, 16)
BATCHES_PER_DRAW = 64
ACCURACY_STEPS = 50  # an accuracy during training is the mean over the batches of so many steps
FORWARD_TOKENS = 2**16  # tokens of one forward in a measurement
DEV_SEED = TEST_SEED // 2  # training seeds are smaller, so development and test sequences are new to the models
SOLVED = 0.02  # the loss on development sequences below which a model has solved its cell of the recall grid
# share of the steps at the full rate: the loss stays on a plateau for thousands of steps before recall is learned, and
# a rate that decays during the plateau keeps the loss there
CONSTANT_RATE_SHARE = 0.6


def build(model: str, seed: int, layers: tuple[str, ...] | None = None, **ska) -> EchoForCausalLM:
    """One of `MODELS` on the device.

    Args:
        layers: the mixer of each layer; default: those of the model.
        ska: options of its SKA layers that differ from the preset.

    Raises:
        ValueError: there is no such model.
    """
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}; known: {sorted(MODELS)}")
    fields = MODELS[model] if layers is None else {"mixer_types": list(layers)}
    mixers = EchoConfig.presets["1m"]["mixers"]
    mixers = mixers | {"ska": mixers["ska"] | ska}
    torch.manual_seed(seed)
    return EchoForCausalLM(EchoConfig.preset("1m", **fields, mixers=mixers)).to(device())


def memory_of(model: str) -> int:
    """How many numbers the memory of one inner layer holds for one sequence, without the last inputs of convolutions.

    The memory of attention grows: its number is 0.
    """
    config = EchoConfig.preset("1m", **MODELS[model])
    if config.mixer_types[1] == ATTENTION:
        return 0
    with torch.device("meta"):
        layer = memory_mixers(EchoForCausalLM(config))[1]
    return sum(math.prod(shape) for name, (shape, _) in layer.state_shapes(1).items() if not name.startswith("conv"))


@torch.no_grad()
def set_ska(model, **options) -> None:
    """Change options of the SKA layers of a trained model."""
    for layer in model.modules():
        if isinstance(layer, SKAMixer):
            layer.options = dataclasses.replace(layer.options, **options)


def seeded_generator(seed: int) -> torch.Generator:
    return torch.Generator(device()).manual_seed(seed)


def value_logits(model, examples: Examples, masked: bool) -> Tensor:
    """Logits [B, n, V] at every question; with `masked`, SKA layers store the tokens of facts only."""
    extra = {"action_mask": examples.action_mask} if masked else {}
    hidden = model.model(input_ids=examples.ids, use_cache=False, **extra).last_hidden_state
    index = examples.positions[..., None].expand(-1, -1, hidden.shape[-1])
    return model.lm_head(hidden.gather(1, index)).float()


def accuracy_of(logits: Tensor, examples: Examples) -> Tensor:
    """The share of questions whose most likely value is the right one; logits [B, n, V] of `value_logits`."""
    values = logits[..., VALUES.start : VALUES.stop].argmax(-1) + VALUES.start
    return (values == examples.values).float().mean()


def learn(
    model,
    batches: Iterable[Examples],
    masked: bool,
    row: dict,
    args: SimpleNamespace,
    accuracy_every: int | None = None,
    **fit_options,
) -> dict:
    """Train for `args.steps` steps, one batch per step, at the row's rate; the loss counts the answers only.

    With `accuracy_every` the result has "accuracies", [step, accuracy] after each multiple of so many steps: the mean
    over the last `ACCURACY_STEPS` batches, each answered before it is learned. The model has seen none of them before.

    Raises:
        ValueError: `accuracy_every` and a checkpoint are given; a training that goes on would miss earlier accuracies.
    """
    if accuracy_every and fit_options.get("checkpoint") is not None:
        raise ValueError("accuracies are not saved in a checkpoint; give accuracy_every or checkpoint, not both")
    stream_of, accuracies = iter(batches), []
    right = torch.zeros((), device=device())
    averaged = min(ACCURACY_STEPS, accuracy_every or 1)

    def note_accuracy(step: int):
        """Called with the number of steps that have run."""
        if accuracy_every and step and step % accuracy_every == 0:
            accuracies.append([step, round(right.item() / averaged, 4)])
        if accuracy_every and (step + averaged) % accuracy_every == 0:
            right.zero_()

    def batch_of(step: int) -> tuple[Tensor, ...]:
        note_accuracy(step)
        batch = next(stream_of)
        return batch.ids, batch.positions, batch.values, batch.action_mask

    def loss_of(*tensors: Tensor) -> Tensor:
        examples = Examples(*tensors)
        logits = value_logits(model, examples, masked)
        if accuracy_every:
            right.add_(accuracy_of(logits.detach(), examples))
        return F.cross_entropy(logits.flatten(0, 1), examples.values.flatten())

    fit_options |= {"constant_rate_share": CONSTANT_RATE_SHARE, "row": row}
    result = fit(model, loss_of, args.steps, row["lr"], args, batch_of, **fit_options)
    if not accuracy_every:
        return result
    note_accuracy(result["steps"])
    return result | {"accuracies": accuracies}


def grid_length(pairs: int, gap: int) -> int:
    """Tokens of a sequence of the recall grid (`mqar.py`)."""
    return TASKS["mqar"][1](pairs) + gap


def budget_of(settings: dict, row: dict) -> tuple[int, int]:
    """Tokens of a training step, at most, and the number of steps in the row's cell of the recall grid.

    A cell [pairs, gap, tokens, steps] of the settings has its own; those of other cells are the settings'.
    """
    for pairs, gap, *own in settings["cells"]:
        if own and (pairs, gap) == (row["pairs"], row["gap"]):
            return tuple(own)
    return settings["batch_tokens"], settings["steps"]


def sequences_per_step(settings: dict, row: dict) -> int:
    """Sequences of a step in the row's cell of the recall grid: "batch" of the settings, or fewer by its tokens."""
    tokens, _ = budget_of(settings, row)
    return max(1, min(settings["batch"], tokens // grid_length(row["pairs"], row["gap"])))


def training_batches(seed: int, batch: int, length: int, pairs: Iterable[int]) -> Iterator[Examples]:
    """Batches of the two trained tasks, with each of the numbers of pairs, all in equal parts and of one length."""
    generator = seeded_generator(seed)
    while True:
        yield from mixture(TRAINED, batch, length, list(pairs), generator, BATCHES_PER_DRAW)


@torch.no_grad()
def measure(model, task: str, length: int, pairs: int, sequences: int, masked: bool, seed: int, **options) -> dict:
    """Loss and accuracy on sequences that the seed draws; training uses other seeds."""
    model.eval()
    batch = max(1, min(sequences, FORWARD_TOKENS // length))
    generator, losses, right = seeded_generator(seed), [], []
    for _ in range(-(-sequences // batch)):
        examples = draw_examples(task, batch, length, pairs, generator, **options)
        with autocast():
            found = value_logits(model, examples, masked)
        losses.append(F.cross_entropy(found.flatten(0, 1), examples.values.flatten()))
        right.append(accuracy_of(found, examples))
    return {"loss": torch.stack(losses).mean().item(), "accuracy": torch.stack(right).mean().item()}


def training_loss(model, masked: bool, length: int, pairs: Iterable[int], sequences: int) -> float:
    """Mean loss on development sequences of the trained tasks; learning rates are chosen by it."""
    found = [measure(model, task, length, n, sequences, masked, DEV_SEED)["loss"] for task in TRAINED for n in pairs]
    return sum(found) / len(found)


@torch.no_grad()
def decode_agreement(model, masked: bool, length: int, pairs: int, sequences: int) -> float:
    """Share of answers that are equal when the model reads token by token through its cache and in one forward."""
    model.eval()
    examples = draw_examples(TRAINED[0], sequences, length, pairs, seeded_generator(DEV_SEED))
    cache, steps = None, []
    with autocast():
        whole = value_logits(model, examples, masked)
        for t in range(length):
            extra = {"action_mask": examples.action_mask[:, t : t + 1]} if masked else {}
            out = model(input_ids=examples.ids[:, t : t + 1], past_key_values=cache, use_cache=True, **extra)
            cache = out.past_key_values
            steps.append(out.logits[:, 0].float())
    index = examples.positions[..., None].expand(-1, -1, whole.shape[-1])
    answers = torch.stack(steps, 1).gather(1, index)
    return (answers.argmax(-1) == whole.argmax(-1)).float().mean().item()
