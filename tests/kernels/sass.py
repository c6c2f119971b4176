"""Finds wgmma descriptors that a kernel's SASS builds from the wrong uniform registers.

ptxas 12.8, which Triton 3.6 includes, sometimes reads a descriptor, or the base to which it adds an offset, from a
register that was never written or that still holds another value (kernels/README.md, "Traps"). The check
follows every path from the kernel's entry and records three facts per register that hold on all paths: it was written;
it holds the low word of a descriptor (a shared-memory address cut to 14 bits, plus offsets); it holds a high word,
made of constants. Register names and widths are those of sm_90.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(.*?)\s*;", re.M)
_REGISTER = re.compile(r"(g?desc\[)?\bUR(\d+)(\.64)?")
_RESULT = re.compile(r"\S+\s+(?:U?P\w+,\s*)*UR(\d+)\b")
_NEVER = ("!PT", "!UPT")

# uniform instructions whose first uniform register, after a predicate or two, is their result
_WRITERS = {
    *("R2UR", "REDUX", "S2UR", "UBMSK", "UBREV", "UFLO", "UIADD3", "UIMAD", "ULDC", "ULEA", "ULOP3", "UMOV", "UP2UR"),
    *("UPOPC", "UPRMT", "USEL", "USGXT", "USHF", "VOTEU"),
}
# and those whose result is a predicate
_TESTS = {"UISETP", "UPLOP3", "UR2UP"}
# these cut a shared-memory address to the bits a descriptor has for it, 14; Triton 3.9 leaves 15, the last one is 0
_CUTS = {"USGXT": (", 0xe", ", 0xf"), "ULOP3": (", 0x3fff,", ", 0x7fff,")}
# of constants these make constants
_CONSTANT = {"UIADD3", "ULOP3", "UMOV", "USEL"}


class Instruction:
    """One line of a listing, and the numbers of the 32-bit uniform registers it touches.

    Attributes:
        guard: the predicate under which it runs, or an empty string.
        descriptors: the registers of its wgmma descriptors as (low, high); empty for other instructions.

    Raises:
        ValueError: a uniform instruction is in none of this module's tables.
    """

    def __init__(self, address: str, guard: str, text: str):
        self.address, self.guard, self.text = int(address, 16), guard, text
        self.family, *self.modifiers = text.split(maxsplit=1)[0].split(".")
        if self.family.startswith("U") and self.family not in _WRITERS | _TESTS:
            raise ValueError(f"add {self.family} to _WRITERS or _TESTS in {Path(__file__).name}: {text}")
        result = _RESULT.match(text) if self.family in _WRITERS else None
        wide = "64" in self.modifiers or "WIDE" in self.modifiers
        self.writes = _registers(int(result[1]), wide) if result else []
        self.reads, self.descriptors = [], []
        for operand in _REGISTER.finditer(text, result.end() if result else 0):
            self._read(operand, operand[1], int(operand[2]))

    def _read(self, operand: re.Match, kind: str | None, register: int) -> None:
        if kind == "gdesc[":
            # four registers: the descriptors of a (unless a is in registers) and of b
            a_in_shared = re.match(r"\S+\s+R\w+, gdesc", self.text)
            self.descriptors = [(low, low + 1) for low in ([register] if a_in_shared else []) + [register + 2]]
            self.reads += [word for descriptor in self.descriptors for word in descriptor]
            return
        # in a * b + c only c is 64 bits wide
        addend = "WIDE" in self.modifiers and "," not in self.text[operand.end() :]
        pairs = self.family.startswith("U") and "64" in self.modifiers
        self.reads += _registers(register, bool(operand[3]) or addend or pairs or kind == "desc[")


class Defect(NamedTuple):
    instruction: Instruction
    what: str

    def __str__(self):
        return f"{self.what} at {self.instruction.address:#06x}: {self.instruction.text}"


class Facts(NamedTuple):
    """Sets of registers as bits of integers."""

    written: int = 0
    low: int = 0
    high: int = 0

    def meet(self, other: "Facts") -> "Facts":
        return Facts(*(a & b for a, b in zip(self, other, strict=True)))

    def after(self, instruction: Instruction) -> "Facts":
        """The facts after an instruction. An instruction under a predicate counts as executed."""
        family, reads, writes = instruction.family, instruction.reads, instruction.writes
        if not writes:
            return self
        if family == "R2UR":
            # the value comes from registers that this check does not follow
            low, high = writes, writes
        elif family == "UIADD3" and len(writes) == 2:
            low = writes[:1] if any(self.low >> r & 1 for r in reads[::2]) else []
            high = writes[1:] if all(self.high >> r & 1 for r in reads[1::2]) else []
        elif (
            family == "ULOP3" and ", 0x3c," in instruction.text and all((self.low | self.high) >> r & 1 for r in reads)
        ):
            # three of these instructions exchange two registers, so each word may be in each of them
            low, high = writes, writes
        else:
            cut = any(mask in instruction.text for mask in _CUTS.get(family, ()))
            low = writes if cut or any(self.low >> r & 1 for r in reads) else []
            high = writes if family in _CONSTANT and all(self.high >> r & 1 for r in reads) else []
        kept = ~_bits(writes)
        return Facts(self.written | _bits(writes), self.low & kept | _bits(low), self.high & kept | _bits(high))


def _registers(first: int, wide: bool) -> list[int]:
    return [first, first + 1] if wide else [first]


def _bits(registers: list[int]) -> int:
    return sum(1 << register for register in set(registers))


def disassemble(cubin: bytes, cuobjdump: str) -> str:
    """The output of `cuobjdump -sass`."""
    return _dump(cubin, cuobjdump, "-sass")


def resources(cubin: bytes, cuobjdump: str) -> dict[str, int]:
    """Per thread: registers ("reg"), bytes of the stack with spills ("stack") and bytes of "local" memory."""
    found = re.findall(r"\b(REG|STACK|LOCAL):(\d+)", _dump(cubin, cuobjdump, "--dump-resource-usage"))
    return {name.lower(): int(size) for name, size in found}


def _dump(cubin: bytes, cuobjdump: str, flag: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([cuobjdump, flag, path], check=True, capture_output=True, text=True).stdout


def parse(listing: str) -> list[Instruction]:
    """The instructions of one kernel in the order of their addresses."""
    return [Instruction(*line) for line in _LINE.findall(listing)]


def _following(code: list[Instruction]) -> list[list[int]]:
    """Indices of the instructions that may come after each one."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    following = []
    for i, instruction in enumerate(code):
        family, nexts = instruction.family, [i + 1] if i + 1 < len(code) else []
        if family in ("BRX", "JMX"):
            raise ValueError(f"cannot follow a jump through a register: {instruction.text}")
        if family in ("BRA", "CALL"):
            target = re.search(r"0x([0-9a-f]+)$", instruction.text)
            # `BRA UP0, 0x40` is conditional although it has no guard, and a call returns
            always = not instruction.guard and "," not in instruction.text and family == "BRA"
            nexts = [index[int(target[1], 16)], *([] if always else nexts)]
        elif family in ("EXIT", "RET") and not instruction.guard:
            nexts = []
        following.append(nexts)
    return following


def defects(listing: str) -> list[Defect]:
    """Reads of registers that are not written on every path, and descriptors whose words are not descriptor words."""
    code = parse(listing)
    following = _following(code)
    facts: list[Facts | None] = [None] * len(code)
    pending = [0] if code else []
    facts[:1] = [Facts()] if code else []
    while pending:
        i = pending.pop()
        after = facts[i].after(code[i])
        for j in following[i]:
            met = after if facts[j] is None else facts[j].meet(after)
            if met != facts[j]:
                facts[j] = met
                pending.append(j)
    found = []
    for instruction, before in zip(code, facts, strict=True):
        if before is None or instruction.guard in _NEVER:
            continue
        unwritten = [r for r in instruction.reads if not before.written >> r & 1]
        found += [Defect(instruction, f"UR{r} is read before it is written") for r in unwritten]
        for low, high in instruction.descriptors:
            if not (before.low >> low & 1 and before.high >> high & 1):
                found.append(Defect(instruction, f"UR{low} and UR{high} are read as a descriptor, which they are not"))
    return found
