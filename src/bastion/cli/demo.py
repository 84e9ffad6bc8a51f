"""`bastion demo`: an answer as it is written, then the methods side by side on the same prompts."""

from __future__ import annotations

from typing import Annotated

import typer

from bastion.cli import options
from bastion.errors import BastionError

QUESTION = "Why is the sky blue? Answer in three sentences."
PROMPTS = {
    "maths": "A baker makes 24 rolls an hour for 5 hours and sells them in bags of 6 for $3 a bag. "
    "How much does he earn? Please reason step by step.",
    "code": "Write a Python function that returns the largest number of a list, without using max().",
    "chat": "Give me three tips for learning to play the piano.",
}
POLICIES = ("plain", "chain", "fixed:16", "roofline", "auto")


def command(
    target: options.Target = options.DEFAULT_TARGET,
    drafter: options.Drafter = "auto",
    device: options.Device = None,
    dtype: options.Dtype = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of each text.")] = 128,
    repeats: Annotated[int, typer.Option(help="Runs of each prompt and method; medians are shown.")] = 3,
) -> None:
    """Write an answer, then compare plain decoding, the DFlash chain, DDTree's trees, BASTION and the default."""
    from rich.console import Console

    from bastion.demo import compare, comparison_table
    from bastion.drafters.mixed import alone

    if repeats < 1 or max_new_tokens < 2:
        raise BastionError("repeats must be 1 or more, and max_new_tokens 2 or more")
    console = Console()
    model = options.load(target, drafter, "auto", None, device, dtype)
    console.print(f"[bold]{QUESTION}[/bold]")
    for piece in model.stream(QUESTION, max_new_tokens=max_new_tokens):
        print(piece, end="", flush=True)
    print("\n")
    rows = compare(model, PROMPTS, POLICIES, max_new_tokens, repeats)
    names = dict.fromkeys((alone(model.drafter).name, model.drafter.name))  # the papers' methods take the first
    console.print(comparison_table(rows, f"{model.target.name}, drafted by {', auto by '.join(names)}"))
    if not all(row.same_text for row in rows):
        dtype = str(model.target.dtype).removeprefix("torch.")
        console.print(
            f"{dtype} may round a near-tie otherwise for many rows than for one: `bastion verify` re-scores it"
        )
