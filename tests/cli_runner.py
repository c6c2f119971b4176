"""Runs the command line inside the process of the test."""

import functools
import json

import typer.testing

from hf_memmix.commands import app

# each call would make all commands again, which takes longer than most refusals
typer.testing._get_command = functools.cache(typer.testing._get_command)

# options of a very short training
SMALL = ["--batch-size", "4", "--block-size", "16", "--steps", "3"]


def memmix(*args):
    """The result of `memmix ARGS`."""
    return typer.testing.CliRunner().invoke(app, [str(arg) for arg in args])


def result_of(run):
    """The JSON that a successful run with --json printed."""
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout)
