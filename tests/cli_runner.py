"""The command line, run inside the test's process."""

import json

from typer.testing import CliRunner

from hf_memmix.commands import app

# a training of a moment
SMALL = ["--batch-size", "4", "--block-size", "16", "--steps", "3"]


def memmix(*args):
    """The result of `memmix ARGS`."""
    return CliRunner().invoke(app, [str(arg) for arg in args])


def result_of(run):
    """What a successful run with --json printed."""
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout)
