"""Trains the mixer of one layer on stored inputs of the layer, by the Trainer and the loss of `align` in memory."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, TrainerCallback
from transformers import initialization as init

from hf_memmix.conversion.families import attention_prefix, decoder_layers
from hf_memmix.conversion.loading import check_finite_tensor
from hf_memmix.conversion.streaming.checkpoint import Checkpoint
from hf_memmix.mixers import MemoryMixer, new_layer
from hf_memmix.training.groups import freeze_by_rate
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.streaming.rows import RowNumbers, Rows
from hf_memmix.training.streaming.spool import HiddenStates
from hf_memmix.training.streaming.teacher import StreamedTeacher
from hf_memmix.training.student_teacher import AlignStudentTeacher, StudentTeacher
from hf_memmix.training.trainer import PairTrainer
from hf_memmix.training.trainer_arguments import training_arguments, uses_bf16

# variables by which a launcher tells a process that it shares its model or batches with others
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
Report = Callable[[int, float | None], None]  # of steps done and the newest loss


class StreamedAlign(AlignStudentTeacher):
    """The loss of `align` for one layer, divided by the number of layers that the run trains.

    So a layer has the gradients of a run in memory, whose loss is the mean over its layers, and the sum of the logged
    losses of all layers is the logged loss of that run.
    """

    def __init__(
        self,
        student,
        teacher: StreamedTeacher,
        layer: int,
        hidden: HiddenStates,
        num_layers: int,
        bf16: bool,
        checkpointing: bool,
        **far,
    ):
        super().__init__(student, teacher.model, [layer], bf16, checkpointing, **far)
        self.streamed, self.hidden, self.num_layers = teacher, hidden, num_layers

    def place_teacher(self, device: torch.device) -> None:
        """Its layer is there already."""

    def loss(
        self, input_ids: Tensor, position_ids: Tensor | None, loss_mask: Tensor | None = None, *, place: Tensor
    ) -> Tensor:
        """`place` [B]: the rows of the spool that hold the inputs of the teacher's layer."""
        hidden = self.hidden.read(place.tolist(), input_ids.device)
        with self.streamed.entering(self.layers[0], hidden):
            return super().loss(input_ids, position_ids, loss_mask) / self.num_layers


class _NoModel(StudentTeacher):
    """In place of a pair, for a Trainer that only tells its order of the data."""

    def __init__(self, student: nn.Module):
        super().__init__(student, None)
        self.weight = nn.Parameter(torch.zeros(1))


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Inside this context the libraries see no launcher: each process of a launch trains layers of its own."""
    hidden = {name: os.environ.pop(name) for name in LAUNCHER if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def order_of_rows(student: PreTrainedModel, length: int, recipe: Recipe, folder: Path) -> list[int]:
    """The numbers of the rows that a run reads from data of `length` rows, in the order in which it reads them."""
    reads = recipe.steps * recipe.batch_size * recipe.gradient_accumulation
    with one_process():
        trainer = _trainer(_NoModel(student), RowNumbers(length), recipe, folder, {})
        loader = trainer.get_train_dataloader()
        order, epoch = [], 0
        while len(order) < reads:
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)
            order += [row for batch in loader for row in batch["row"].tolist()]
            epoch += 1
    return order[:reads]


def take_mixer(student: PreTrainedModel, layer: int, start: Checkpoint) -> MemoryMixer:
    """Put the mixer of one layer, in fp32, into a student on "meta". `start`: the files of the student."""
    prefix = attention_prefix(student, layer) + "."
    with init.no_init_weights():
        mixer = new_layer(student.config.mixer_types[layer], student.config, layer).float()
    with start:
        values = {name: start.read(prefix + name) for name in mixer.state_dict()}
    for name, value in values.items():
        check_finite_tensor(value, prefix + name, repr(str(start.folder)))
    mixer.load_state_dict(values)
    setattr(decoder_layers(student)[layer], prefix[:-1].rpartition(".")[2], mixer)
    return mixer


def train_mixer(
    student: PreTrainedModel,
    teacher: StreamedTeacher,
    layer: int,
    rows: Rows,
    hidden: HiddenStates,
    recipe: Recipe,
    num_layers: int,
    folder: Path,
    report: Report | None = None,
) -> list[dict]:
    """Train the mixer that `take_mixer` has put into the student, while its layer of the teacher has weights.

    Args:
        num_layers: number of layers that the whole run trains.
        folder: a folder for the Trainer, which writes nothing there.

    Returns:
        the log of the run, `{"step", "loss", "learning_rate", "tokens"}` per row. The loss is that of this layer.

    Raises:
        ValueError: training diverges, or the recipe trains no parameter of this layer.
    """
    bf16 = uses_bf16(recipe)
    with one_process():
        far = {"far_weight": recipe.far_weight, "far_window": recipe.far_window}
        pair = StreamedAlign(student, teacher, layer, hidden, num_layers, bf16, recipe.gradient_checkpointing, **far)
        rates = freeze_by_rate(student, recipe)
        trainer = _trainer(pair, rows.with_places(), recipe, folder, rates)
        if report is not None:
            trainer.add_callback(_Report(report, num_layers))
        trainer.run(None)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    log = [{name: entry[name] for name in ("step", "loss", "learning_rate", "tokens")} for entry in log]
    trainer.accelerator.free_memory()
    pair.mixers.cpu()
    del trainer, pair
    gc.collect()
    return [entry | {"loss": entry["loss"] * num_layers} for entry in log]


def _trainer(pair: StudentTeacher, data, recipe: Recipe, folder: Path, rates: dict) -> PairTrainer:
    trainer = PairTrainer(
        model=pair,
        args=training_arguments(replace(recipe, save_every=0), folder),
        train_dataset=data,
        parameter_rates=rates,
        identity={},
        tokens_per_step=recipe.tokens_per_step,
    )
    for default in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(default)
    return trainer


class _Report(TrainerCallback):
    """Calls `report` after every step."""

    def __init__(self, report: Report, num_layers: int):
        self._report, self._num_layers = report, num_layers

    def on_step_end(self, args, state, control, **kwargs):
        loss = getattr(state, "newest_loss", None)
        self._report(state.global_step, None if loss is None else loss * self._num_layers)
