"""Repeats what a recorder wrote down: the function that `_tape` calls in the place of a launch function.

A tape has a list of cells: the arguments of the call, the stream, the constants of all steps, and a place for every
tensor, address and group (tuple) of these that the call makes. A step puts groups together, calls an allocation, an
operator or Triton's launcher with arguments that one `itemgetter` collects, and keeps or forgets tensors. So a replay
costs little more than the calls.
"""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from types import FunctionType
from typing import NamedTuple

import torch

from ._launcher import launch_of
from ._recorder import NotTaped, Recorder, Slot, slots_in

ALIGNED = 16  # bytes; Triton compiles other code for addresses that are not multiples of it

# inductor's allocation on the current GPU, which takes half the time of `torch.empty_strided`
_EMPTY = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if torch.cuda.is_available() else None


def player(recorder: Recorder, by_address: bool) -> FunctionType:
    """The function that repeats what was written down.

    Args:
        by_address: kernels get addresses, as Triton's launcher for a GPU needs them, and views that only kernels read
            are not made. Without it they get tensors.

    Raises:
        NotTaped: the call cannot be repeated.
    """
    if recorder.reason is not None:
        raise NotTaped(recorder.reason)
    return _Writer(recorder, by_address).play()


class Step(NamedTuple):
    """One step of a tape.

    Attributes:
        groups: (cell, function of the cells that gives its content) of what is put together first.
        call: what is called.
        collect: a function of the cells that gives the arguments of `call`.
        after: what is done with the cells and the result, or None.
    """

    groups: tuple
    call: Callable
    collect: Callable[[list], tuple]
    after: Callable[[list, object], None] | None


class _Writer:
    """Makes the cells and the steps of a tape."""

    def __init__(self, recorder: Recorder, by_address: bool):
        self.recorder, self.by_address = recorder, by_address
        self.inside = recorder.inside if by_address else {}
        self.stream = len(recorder.arguments)
        self.cells = [None] * (self.stream + 1)
        self.constants = {}  # (type, text or identity) of a constant: its cell
        self.groups = {}  # cells of a tuple of constants and addresses, which do not change in a call: its cell
        self.tensors = {slot: i for i, slot in enumerate(recorder.arguments) if slot is not None}  # slot: its cell
        self.addresses = {}  # slot of a tensor with memory of its own: {bytes from its start: the cell of the address}
        launches = [step for step in recorder.steps if step.kind == "launch"]
        read = {self.root(slot) for step in launches for slot in slots_in(step.args)}
        # slots that must be tensors; from the last step to the first, what an operator or a needed view reads is one
        made = read | set(slots_in(recorder.outputs))
        for step in reversed(recorder.steps):
            if step.kind == "operator" or (step.kind == "view" and made & set(step.results)):
                made |= set(slots_in(step.args) + slots_in(step.kwargs))
        self.steps = [
            step for step in recorder.steps if step.kind in ("launch", "operator") or made & set(step.results)
        ]

    def play(self) -> FunctionType:
        launches = [step for step in self.steps if step.kind == "launch"]
        written = {id(step): self.launch(step) for step in launches}  # first: they say which addresses are needed
        arguments, stream, by_address = self.stream, self.stream, self.by_address
        given = [(self.tensors[slot], self.places(slot)) for slot in self.addresses if slot in self.tensors]
        write = {"allocate": self.allocate, "view": self.operator, "operator": self.operator}
        uses = {}  # slot: the last step that uses it
        for i, step in enumerate(self.steps):
            for slot in (*step.results, *slots_in(step.args), *slots_in(step.kwargs)):
                uses[slot] = uses[self.root(slot)] = i
        steps, made, returned = [], set(), set(slots_in(self.recorder.outputs))
        for i, step in enumerate(self.steps):
            found = written[id(step)] if step.kind == "launch" else write[step.kind](step)
            made |= set(step.results)
            if unused := [self.tensor(slot) for slot in sorted(made - returned) if uses[slot] == i]:
                found = found._replace(after=_forget(unused, found.after))
            steps.append(found)
        groups, (output,) = self.cells_of((self.recorder.outputs,), self.tensor)
        empty = self.cells  # complete now
        device = torch._C._cuda_getDevice() if by_address else None
        current_stream = torch._C._cuda_getCurrentRawStream if by_address else None

        def play(*args):
            cells = empty.copy()
            cells[:arguments] = args
            if by_address:
                for cell, places in given:
                    start = cells[cell].data_ptr()
                    for place, offset in places:
                        cells[place] = start + offset
                cells[stream] = current_stream(device)
            for parts, call, collected, after in steps:
                for cell, found in parts:
                    cells[cell] = found(cells)
                result = call(*collected(cells))
                if after is not None:
                    after(cells, result)
            for cell, found in groups:
                cells[cell] = found(cells)
            return cells[output]

        play.arguments, play.steps = arguments, steps
        return play

    def allocate(self, step) -> Step:
        (slot,), (shape, stride, dtype, device) = step.results, step.form
        if _EMPTY and device.type == "cuda" and device.index == torch._C._cuda_getDevice():
            call, form = _EMPTY, (shape, stride, dtype)
        else:
            call, form = partial(torch.empty_strided, dtype=dtype, device=device), (shape, stride)
        return Step(*self.calling(call, form, self.tensor), _keep(self.tensor(slot), self.places(slot), checked=True))

    def operator(self, step) -> Step:
        call, form = step.call, step.args
        if step.kwargs:
            names, positional, operator = tuple(step.kwargs), len(step.args), step.call
            form = (*step.args, *step.kwargs.values())

            def call(*given):
                named = zip(names, given[positional:], strict=True)
                return operator(*given[:positional], **dict(named))

        keeps = [_keep(self.tensor(slot), self.places(slot)) for slot in step.results]
        after = keeps[0] if keeps and not step.form else None
        if step.form:

            def after(cells, results):
                for keep, result in zip(keeps, results, strict=True):
                    keep(cells, result)

        return Step(*self.calling(call, form, self.tensor), after)

    def launch(self, step) -> Step:
        grid, kernel = step.form
        if not self.by_address:
            return Step(*self.calling(partial(step.call[grid], **step.kwargs), step.args, self.tensor), None)
        self.constant(kernel)  # keeps its code on the GPU
        call, form = launch_of(kernel, grid, _STREAM, step.args)
        return Step(*self.calling(call, form, self.address), None)

    def calling(self, call: Callable, form: tuple, cell_of: Callable[[Slot], int]) -> tuple:
        """The first three attributes of a `Step` that calls `call` with `form`, as `cells_of` puts it together."""
        groups, cells = self.cells_of(form, cell_of)
        return groups, call, _picker(cells)

    def cells_of(self, form: tuple | list, cell_of: Callable[[Slot], int]) -> tuple[tuple, tuple[int, ...]]:
        """The groups that must be put together before, and the cell of each part of `form`.

        `cell_of` gives the cell of a slot. A group of addresses is put together once: it does not change in a call.
        """
        groups, cells = [], []
        for part in form:
            if isinstance(part, Slot):
                cells.append(cell_of(part))
            elif part is _STREAM:
                cells.append(self.stream)
            elif slots_in(part):
                inner, members = self.cells_of(part, cell_of)
                groups += inner
                kept = type(part) is tuple and cell_of == self.address
                cell = self.groups.get(members) if kept else None
                if cell is None:
                    cell = self.new_cell()
                    pick = _picker(members)
                    groups.append((cell, pick if type(part) is tuple else lambda cells, pick=pick: list(pick(cells))))
                    if kept:
                        self.groups[members] = cell
                cells.append(cell)
            else:
                cells.append(self.constant(part))
        return tuple(groups), tuple(cells)

    def new_cell(self, content=None) -> int:
        self.cells.append(content)
        return len(self.cells) - 1

    def constant(self, x) -> int:
        """The cell of an object that is the same in every call; numbers with the same text share one."""
        key = (type(x), repr(x)) if x is None or type(x) in (bool, int, float) else id(x)
        if key not in self.constants:
            self.constants[key] = self.new_cell(x)
        return self.constants[key]

    def root(self, slot: Slot) -> Slot:
        return self.inside.get(slot, (slot, 0))[0]

    def tensor(self, slot: Slot) -> int:
        """The cell of a tensor."""
        if slot not in self.tensors:
            self.tensors[slot] = self.new_cell()
        return self.tensors[slot]

    def address(self, slot: Slot) -> int:
        """The cell of a tensor's address; whoever makes the tensor in whose memory it lies fills it."""
        root, start = self.inside.get(slot, (slot, 0))
        places = self.addresses.setdefault(root, {})
        if start not in places:
            places[start] = self.new_cell()
        return places[start]

    def places(self, slot: Slot) -> list[tuple[int, int]]:
        """(cell, bytes from the start) of every address in this tensor's memory that a kernel reads."""
        return [(cell, offset) for offset, cell in self.addresses.get(slot, {}).items()]


_STREAM = object()  # stands for the current stream of a call


def _picker(places: tuple[int, ...]) -> Callable[[list], tuple]:
    """A function of the cells that gives those at `places` as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda cells: tuple([cells[place] for place in places])


def _keep(cell: int, places: list[tuple[int, int]], checked: bool = False) -> Callable[[list, object], None]:
    """Puts a tensor into its cell, and the addresses in its memory into theirs. `checked`: it must be aligned."""

    def keep(cells, tensor):
        cells[cell] = tensor
        if places:
            start = tensor.data_ptr()
            if checked and start % ALIGNED:
                _misaligned()
            for place, offset in places:
                cells[place] = start + offset

    return keep


def _forget(unused: list[int], before: Callable | None) -> Callable[[list, object], None]:
    """Forgets tensors after their last use, so that the next allocation may have their memory."""

    def forget(cells, result):
        if before is not None:
            before(cells, result)
        for cell in unused:
            cells[cell] = None

    return forget


def _misaligned():
    raise RuntimeError(
        f"the allocator of GPU memory returned an address that is not a multiple of {ALIGNED}: set HF_MEMMIX_TAPES=0"
    )
