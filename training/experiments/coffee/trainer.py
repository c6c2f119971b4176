"""Trains many tiny models at once: all seeds of a setting are one model, steps are one CUDA graph, settings overlap.

A `Run` has a model of S copies, a function that draws a batch for each copy, and the number of steps. `train(runs)`
runs them on separate CUDA streams, because one of them alone cannot use the whole GPU. No run waits for a slower one.
Kernels of several processes do not run at the same time, so all settings should be in one process, and other jobs on
the same GPU take their share of its time. The losses of the copies are summed and Adam works elementwise, so each copy
is trained as if it were alone.
"""

import functools
import math
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from hf_memmix.training.experiments.common.averages import median

SLICE = 50  # steps of one run before the next has its turn
STEPS_PER_GRAPH = 10  # at most; Python launches a graph once for so many steps
SLICES_AHEAD = 2  # that wait for the device
SAVE_EVERY = 30.0  # seconds between two writings of what has been found so far


@dataclass
class Run:
    """One setting, trained for all seeds at once.

    Args:
        name: key of its results.
        model: maps the inputs that `draw` gives to logits [S, B, ..., classes].
        draw: (batch, generator) -> (inputs, labels [S, B, ...]), without waiting for the device.
        test: generator -> pairs of inputs and labels, for measuring accuracy.
        seed: seed of the training data. The test data have another seed; the model is initialised by the caller.
        learning_rate: learning rate of Adam.
        iterations: largest number of steps.
        evaluate_every: number of steps between two evaluations.
        enough: stop when every copy has this accuracy.
        lower_rate: (loss, rate): use this rate when the mean training loss of the copies is below this loss.
        info: further entries of the results.
    """

    name: str
    model: nn.Module
    draw: Callable
    test: Callable[[torch.Generator], Iterable]
    seed: int = 0
    batch: int = 512
    learning_rate: float = 0.01
    iterations: int = 10_000
    evaluate_every: int = 1000
    enough: float = 2.0
    lower_rate: tuple[float, float] | None = None
    info: dict = field(default_factory=dict)

    def prepare(self, device: torch.device):
        """Move to the device and make the steps: a CUDA graph on a GPU."""
        cuda = device.type == "cuda"
        self.model.to(device)
        self.generator = torch.Generator(device).manual_seed(2 * self.seed)
        self.test_generator = torch.Generator(device).manual_seed(2 * self.seed + 1)
        rate = torch.tensor(self.learning_rate, device=device) if cuda else self.learning_rate
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate, capturable=cuda, fused=cuda or None)
        self.train_loss = torch.zeros((), device=device)
        self.done, self.curve, self.slices = 0, [], []
        self.stream = torch.cuda.Stream() if cuda else None
        if cuda:
            torch.cuda.synchronize()  # the stream of its own starts from what the default one has made
        self.per_launch = math.gcd(STEPS_PER_GRAPH, self.evaluate_every, self.iterations) if cuda else 1
        self.step = self._capture() if cuda else self._step

    def _set_rate(self, rate: float):
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"].fill_(rate) if torch.is_tensor(group["lr"]) else rate

    @property
    def due(self) -> bool:
        """Whether the next turn is an evaluation."""
        at_point = self.done and (self.done % self.evaluate_every == 0 or self.done >= self.iterations)
        return bool(at_point) and (not self.curve or self.curve[-1]["iteration"] != self.done)

    @property
    def ready(self) -> bool:
        """Whether the next turn need not wait for the device. An evaluation waits for all steps before it."""
        self.slices = [event for event in self.slices if not event.query()]
        return len(self.slices) < (1 if self.due else SLICES_AHEAD)

    def advance(self):
        """Evaluate if it is time, else train until the next evaluation, by `SLICE` steps at most.

        On a GPU the steps are launched and not waited for.
        """
        if self.due:
            self.evaluate()
            return
        steps = min(SLICE, self.iterations - self.done, self.evaluate_every - self.done % self.evaluate_every)
        with torch.cuda.stream(self.stream):
            for _ in range(steps // self.per_launch):
                self.step()
            if self.stream is not None:
                self.slices.append(self.stream.record_event())
        self.done += steps

    @torch.no_grad()
    def evaluate(self):
        """Append accuracy and loss of every copy on the test to the curve; lower the rate if it is time."""
        right, loss, count = 0, 0, 0
        with torch.cuda.stream(self.stream):
            for inputs, labels in self.test(self.test_generator):
                logits = self.model(*inputs)
                right = right + (logits.argmax(-1) == labels).flatten(1).sum(1)
                loss = loss + _losses(logits, labels).sum(1)
                count += labels[0].numel()
            accuracy, loss = (right / count).tolist(), (loss / count).tolist()
            if self.lower_rate is not None and self.train_loss.item() < self.lower_rate[0]:
                self._set_rate(self.lower_rate[1])
            self.curve.append({"iteration": self.done, "accuracy": accuracy, "loss": loss})

    def stop(self):
        """Measure what has been trained since the last evaluation."""
        if not self.curve or self.curve[-1]["iteration"] != self.done:
            self.evaluate()

    @property
    def finished(self) -> bool:
        solved = bool(self.curve) and min(self.curve[-1]["accuracy"]) >= self.enough
        return not self.due and (self.done >= self.iterations or solved)

    def results(self) -> dict:
        """The results so far: for each seed, the best evaluation (the paper keeps the best model) and the last one."""
        best = [max(row["accuracy"][s] for row in self.curve) for s in range(len(self.curve[0]["accuracy"]))]
        return {
            **self.info,
            "parameters": sum(p.numel() for p in self.model.parameters()) // len(best),
            "learning_rate": self.learning_rate,
            "batch": self.batch,
            "seeds": len(best),
            "iterations": self.done,
            "planned_iterations": self.iterations,
            "best_accuracy": {"median": median(best), "min": min(best), "max": max(best)},
            "seeds_at_0.99": sum(a >= 0.99 for a in best),
            "best_accuracy_of_seeds": best,
            "last": self.curve[-1],
            "curve": [
                {
                    "iteration": row["iteration"],
                    "accuracy": [round(a, 4) for a in row["accuracy"]],
                }
                for row in self.curve
            ],
        }

    def _step(self):
        self.optimizer.zero_grad()
        inputs, labels = self.draw(self.batch, self.generator)
        loss = _losses(self.model(*inputs), labels).mean(1)
        loss.sum().backward()
        self.optimizer.step()
        if hasattr(self.model, "project_"):
            self.model.project_()
        self.train_loss.copy_(loss.detach().mean())

    def _capture(self):
        """A function that runs `per_launch` steps by one CUDA graph."""
        start = {name: t.clone() for name, t in self.model.state_dict().items()}
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._step()
        torch.cuda.synchronize()
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(self.per_launch):
                self._step()
        # the warm-up is no part of the training
        with torch.no_grad():
            self.model.load_state_dict(start)
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        self.generator.manual_seed(2 * self.seed)
        torch.cuda.synchronize()
        self.graph = graph
        return graph.replay


def train(
    runs: list[Run],
    device: torch.device,
    seconds: float = float("inf"),
    report: Callable[[str], None] = print,
    save: Callable[[dict[str, dict]], None] | None = None,
) -> dict[str, dict]:
    """Train all runs at the same time, for at most this number of seconds; returns their results by name.

    The result of a run that fails is {"error": ...}; the others continue.

    Args:
        report: called with a line of text after every evaluation.
        save: called about every 30 seconds with the results so far of the runs that have been evaluated.
    """
    start, found, active = time.perf_counter(), {}, []
    for run in runs:
        _guarded(run, found, functools.partial(run.prepare, device), active.append)
    active, saved = [run for run in active if not run.finished], time.perf_counter()
    while active and time.perf_counter() - start < seconds:
        ready = [run for run in active if run.ready]
        if not ready:
            time.sleep(2e-4)
        for run in ready:
            active.remove(run)
            points = len(run.curve)
            _guarded(run, found, run.advance, active.append)
            if run.name in found:
                continue
            if run.finished:
                active.remove(run)
            if len(run.curve) > points:
                row = run.curve[-1]["accuracy"]
                report(
                    f"{time.perf_counter() - start:6.1f} s  {run.name:24} {run.done:7}  {min(row):.3f}..{max(row):.3f}"
                )
        if save is not None and time.perf_counter() - saved > SAVE_EVERY:
            save(found | {run.name: run.results() for run in runs if run.name not in found and run.curve})
            saved = time.perf_counter()
    for run in runs:
        if run.name not in found:
            _guarded(run, found, run.stop, lambda run: found.update({run.name: run.results()}))
    return {run.name: found[run.name] for run in runs}


def _losses(logits, labels):
    """Cross-entropy [S, predictions of a copy]."""
    classes = logits.shape[-1]
    losses = F.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1), reduction="none")
    return losses.view(logits.shape[0], -1)


def _guarded(run, found, action, then):
    try:
        action()
        then(run)
    except Exception as error:
        traceback.print_exc()
        found[run.name] = {**run.info, "error": f"{type(error).__name__}: {error}"}
