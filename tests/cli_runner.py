"""Runs the command line inside the process of the test."""

import json

from typer.testing import CliRunner

from hf_memmix.commands import app

# options of a very short training
SMALL = ["--batch-size", "4", "--block-size", "16", "--steps", "3"]


def memmix(*args):
    """The result of `memmix ARGS`."""
    return CliRunner().invoke(app, [str(arg) for arg in args])


def result_of(run):
    """The JSON that a successful run with --json printed."""
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout)
