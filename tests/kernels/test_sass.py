"""Compiled for an H200, no kernel reads a descriptor from the wrong register (kernels/README.md, "Traps").

By default one kernel is compiled. `-m slow` compiles every op, dtype and size, each case in its own process; `-n 8`
runs 8 of them at the same time.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import sass
from ops_table import OPS

SIZES = ["16x16", "32x32", "64x64", "128x128", "256x256", "64x32", "32x64", "96x48", "128x64", "40x72"]
# options with which other kernels are compiled than with the op's defaults
OPTIONS = {
    "gla": ['{"chunk_size": 32}', '{"chunk_size": 128}'],
    "gla_shared": ['{"chunk_size": 128}'],
    "window": ['{"sinks": 1}'],
}
NAMES = [*(op.name for op in OPS), "window"]
CASES = [(name, options) for name in NAMES for options in ["{}", *OPTIONS.get(name, [])]]

# how ptxas builds descriptors: UR6 is the address, UR12 .. UR15 hold the first descriptors (that of b in UR14 and
# UR15); then one that is 64 units further, and a loop over it
SOUND = """
    /*0000*/                   S2UR UR4, SR_CgaCtaId ;          /* 0x00000000000479c3 */
                                                                /* 0x000e220000008800 */
    /*0010*/                   UMOV UR5, 0x400 ;
    /*0020*/                   ULEA UR5, UR4, UR5, 0x18 ;
    /*0030*/                   USHF.R.U32.HI UR6, URZ, 0x4, UR5 ;
    /*0040*/                   USGXT.U32 UR6, UR6, 0xe ;
    /*0050*/                   UMOV UR14, UR6 ;
    /*0060*/                   UMOV UR15, 0x80000020 ;
    /*0070*/                   UIADD3 UR8, UP0, UR6, 0x40, URZ ;
    /*0080*/                   UMOV UR4, URZ ;
    /*0090*/                   UIADD3.X UR9, UR4, -0x7fffffe0, URZ, UP0, !UPT ;
    /*00a0*/                   HGMMA.64x32x16.F32.BF16 R56, R88, gdesc[UR12].tnspB, RZ, !UPT ;
    /*00b0*/                   UIADD3.64 UR18, UR8, 0x40, URZ ;
    /*00c0*/                   HGMMA.64x32x16.F32.BF16 R56, R84, gdesc[UR16].tnspB, R56, gsb0 ;
    /*00d0*/              @!PT LDS RZ, [UR50] ;
    /*00e0*/               @P0 BRA 0xb0 ;
    /*00f0*/                   EXIT ;
    /*0100*/                   BRA 0x100;
"""


def faults(listing: str) -> list[str]:
    return list(map(str, sass.defects(listing)))


def test_sound_code_passes():
    assert not faults(SOUND)
    operands = sass.parse(SOUND)[11]
    assert (operands.address, operands.reads, operands.writes) == (0xB0, [8, 9], [18, 19])


def test_an_address_cut_as_by_newer_versions():
    """Triton 3.9 leaves 15 bits of it."""
    assert not faults(SOUND.replace("USGXT.U32 UR6, UR6, 0xe", "USGXT.U32 UR6, UR6, 0xf"))
    assert faults(SOUND.replace("USGXT.U32 UR6, UR6, 0xe", "USGXT.U32 UR6, UR6, 0x10"))


def test_a_register_that_was_never_written():
    """This fault was found in GKA's read-out at key size 64, value size 32, bf16."""
    found = faults(SOUND.replace("UP0, UR6, 0x40", "UP0, UR7, 0x40"))
    assert found[0] == "UR7 is read before it is written at 0x0070: UIADD3 UR8, UP0, UR7, 0x40, URZ"
    assert "UR18 and UR19" in found[1] and "0x00c0" in found[1]


def test_a_register_that_holds_something_else():
    """As found in GKA's backward at the same sizes: base and carry from a register last used for an index."""
    found = faults(SOUND.replace("UP0, UR6, 0x40", "UP0, UR4, 0x40"))
    assert len(found) == 1 and "UR18 and UR19 are read as a descriptor" in found[0]


def test_a_high_word_that_is_no_constant():
    found = faults(SOUND.replace("UMOV UR15, 0x80000020", "S2UR UR15, SR_CTAID.X"))
    assert len(found) == 1 and "UR14 and UR15 are read as a descriptor" in found[0]


def test_words_exchanged_by_exclusive_or():
    """ptxas exchanges two registers by three exclusive ors; after them UR14 and UR15 hold the right words."""
    swap = "".join(
        f"\n    /*006{i}*/                   ULOP3.LUT UR{to}, UR14, UR15, URZ, 0x3c, !UPT ;"
        for i, to in enumerate((14, 15, 14), start=1)
    )
    low_last = SOUND.replace("UR15, 0x80000020", "UR14, 0x80000020").replace("UMOV UR14, UR6", "UMOV UR15, UR6")
    exchanged = low_last.replace("UR14, 0x80000020 ;", "UR14, 0x80000020 ;" + swap)
    assert faults(low_last) and not faults(exchanged)
    assert faults(exchanged.replace("UMOV UR15, UR6", "S2UR UR15, SR_CTAID.X"))


def test_every_path_has_to_write():
    """On a path that jumps over the write, the register is not written. A write under a predicate counts as
    executed.
    """
    assert faults(SOUND.replace("UMOV UR5, 0x400", "@P1 BRA 0x30"))[0].startswith("UR5 is read before it is written")
    assert not faults(SOUND.replace("                   UMOV UR5, 0x400", "               @P1 UMOV UR5, 0x400"))


@pytest.mark.parametrize(
    ("text", "reads", "writes"),
    [
        ("UIMAD.WIDE.U32 UR4, UR6, 0x540, UR8", [6, 8, 9], [4, 5]),
        ("UIMAD.WIDE UR42, UR17, UR16, URZ", [17, 16], [42, 43]),
        ("IMAD.WIDE.U32 R16, R2, UR8, R22", [8], []),
        ("IMAD.WIDE.U32 R30, R18, R31, UR4", [4, 5], []),
        ("LDG.E.128 R44, desc[UR18][R52.64+-0x8000]", [18, 19], []),
        ("LDSM.16.M88.4 R120, [R189+UR6+0x4000]", [6], []),
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12].tnspA.tnspB, R24", [12, 13, 14, 15], []),
        ("HGMMA.64x8x8.F32.TF32 R44, R56, gdesc[UR4], R44", [6, 7], []),
        ("ULDC.64 UR4, c[0x0][0x218]", [], [4, 5]),
        ("USHF.L.U64.HI UR26, UR7, 0x3, UR9", [7, 9], [26]),
        ("ULEA.HI.X UR11, UR9, UR11, UR61, 0x8, UP0", [9, 11, 61], [11]),
        ("UIADD3 UR8, UP0, UR6, 0x2, URZ", [6], [8]),
        ("ULOP3.LUT UP0, URZ, UR40, 0x20, URZ, 0xc0, !UPT", [40], []),
        ("UISETP.GE.AND.EX UP0, UPT, UR7, UR53, UPT, UP0", [7, 53], []),
        ("R2UR UR6, R6.reuse", [], [6]),
        ("VOTEU.ANY UP0, P0", [], []),
    ],
)
def test_operands(text, reads, writes):
    instruction = sass.Instruction("0", "", text)
    assert (instruction.reads, instruction.writes) == (reads, writes)


def test_unknown_uniform_instructions_are_an_error():
    with pytest.raises(ValueError, match="add UNEW"):
        sass.Instruction("0", "", "UNEW UR4, UR5")


def compile_op(*arguments: str) -> None:
    """Compile in a new process, because this process may run Triton's interpreter in place of the compiler."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip(f"Triton brings an x86-64 Linux ptxas, this is {platform.system()} {platform.machine()}")
    if missing := [tool for tool in ("ptxas", "cuobjdump") if not (tools / tool).exists()]:
        pytest.skip(f"this Triton has no {' and no '.join(missing)} in {tools}")
    script = Path(__file__).with_name("compile_only.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, *arguments], env=environment, capture_output=True, text=True)
    print(done.stdout)
    lines = done.stdout.splitlines()
    bad = [line for line in lines if not line.startswith("ok")]
    assert done.returncode == 0 and lines, "\n".join([*bad, done.stderr[-4000:]])


@pytest.mark.product  # many tokens or iterations
def test_one_kernel_compiles_soundly():
    compile_op("gla", "--dtypes", "bfloat16", "--sizes", "32x32", "--layouts", "batched")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("op", "options"), CASES)
def test_all_kernels_compile_soundly(op, options, dtype):
    compile_op(op, "--dtypes", dtype, "--options", options, "--sizes", *SIZES)
