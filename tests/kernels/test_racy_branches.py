"""No step on pages branches on memory that another program may write (racy_branches.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# a loop up to a number that was loaded, or read by one thread, from a state that the kernel also writes
LOOP = """
  tt.func public @step(%states: !tt.ptr<i64> loc("states"(#loc)), %o: !tt.ptr<f32> loc("o"(#loc))) {
    %c0 = arith.constant 0 : i64 loc(#loc1)
    %c1 = arith.constant 1 : i64 loc(#loc1)
    %zero = arith.constant 0.000000e+00 : f32 loc(#loc1)
    %p = tt.addptr %states, %c1 : !tt.ptr<i64>, i64 loc(#loc2)
    %seen = tt.load %p : !tt.ptr<i64> loc(#loc2)
    %filled = arith.minsi %seen, %c1 : i64 loc(#loc2)
    %sum = scf.for %i = %c0 to %filled step %c1 iter_args(%x = %zero) -> (f32)  : i64 {
      %more = arith.addf %x, %x : f32 loc(#loc3)
      scf.yield %more : f32 loc(#loc3)
    } loc(#loc3)
    tt.store %o, %sum : !tt.ptr<f32> loc(#loc4)
    tt.store %p, %filled : !tt.ptr<i64> loc(#loc4)
"""
ATOMIC = LOOP.replace("tt.load %p", "tt.atomic_rmw add, relaxed, gpu, %p, %c0, %true")
# the loop has a fixed end, and carries the number out to a branch
CARRIED = LOOP.replace("to %filled", "to %c1").replace("addf %x, %x", "addf %x, %seen")
CARRIED += "    %due = arith.cmpf ogt, %sum, %zero : f32\n    scf.if %due {\n    }\n"


@pytest.mark.parametrize(
    ("ttir", "number"),
    [
        (LOOP, 1),
        (LOOP.replace("tt.store %p, %filled", "tt.store %o, %filled"), 0),
        (ATOMIC, 0),
        (CARRIED, 1),
        (CARRIED.replace("%x, %seen", "%x, %x"), 0),
    ],
    ids=["loaded", "not written", "read by one thread", "carried by a loop", "carries another number"],
)
def test_finds_branches_on_what_was_loaded(ttir, number):
    pytest.importorskip("triton", reason="triton is not installed")
    from racy_branches import racy_branches

    assert len(racy_branches(ttir)) == number


def test_no_step_branches_on_what_another_program_writes():
    """In a new process, because this process may run Triton's interpreter in place of the compiler."""
    pytest.importorskip("triton", reason="triton is not installed")
    script = Path(__file__).with_name("racy_branches.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
