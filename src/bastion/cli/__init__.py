"""The command line: one file a command. Heavy imports stay inside the commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from bastion.cli import bench, calibrate, demo, doctor, evaluate_drafter, generate, models, synthesize, train, verify
from bastion.errors import BastionError

app = typer.Typer(
    help="Exact, budget-aware speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.command)
app.command("calibrate")(calibrate.command)
app.command("doctor")(doctor.command)
app.command("demo")(demo.command)
app.command("synthesize")(synthesize.command)
app.command("train")(train.command)
app.command("evaluate-drafter")(evaluate_drafter.command)
app.command("bench")(bench.command)
app.command("verify")(verify.command)
app.add_typer(models.app, name="models")


def main() -> None:
    """Run a command. A BastionError becomes one line on standard error and exit status 2."""
    run(app)


def run(program: Callable[[], None]) -> None:
    """Run a program of the package as `main` does; torch must not be loaded yet."""
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # docs/decisions/0005-spin-less.md; read when torch is loaded
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its notices would run into the text
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1")
    try:
        program()
    except BastionError as error:
        print(f"bastion: {error}", file=sys.stderr)
        sys.exit(2)
