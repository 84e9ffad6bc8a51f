"""`bastion demo`: an answer as it is written, then plain against tree decoding on the same prompts."""

from __future__ import annotations

from typing import Annotated

import typer

from bastion.cli import options
from bastion.errors import BastionError

QUESTION = "Why is the sky blue? Answer in three sentences."
FUNCTION = '''def total_price(items, tax):
    """Sum the prices of the items and add the tax."""
    total = 0
    for item in items:
        if item["price"] < 0:
            raise ValueError("negative price")
        total += item["price"] * item["quantity"]
    return total * (1 + tax)'''
PROMPTS = {
    "chat": "Give me three tips for learning to play the piano.",
    "quote": "Repeat this text word for word, then summarise it in one sentence:\n\n"
    "The honey bee lives in colonies of up to sixty thousand workers. Each worker visits hundreds of flowers a day, "
    "and a colony needs many kilograms of honey to live through the winter.",
    "edit": "Rename the parameter `items` to `basket` in this function and print the whole function:\n\n"
    f"```python\n{FUNCTION}\n```",
}


def command(
    target: options.Target = options.DEFAULT_TARGET,
    drafter: options.Drafter = "ngram",
    device: options.Device = None,
    dtype: options.Dtype = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of each text.")] = 128,
    repeats: Annotated[int, typer.Option(help="Runs of each prompt and method; medians are shown.")] = 3,
) -> None:
    """Write an answer to a built-in prompt, then compare plain with tree decoding on the same prompts."""
    from rich.console import Console

    from bastion.demo import compare, comparison_table

    if repeats < 1 or max_new_tokens < 2:
        raise BastionError("repeats must be 1 or more, and max_new_tokens 2 or more")
    console = Console()
    model = options.load(target, drafter, "auto", None, device, dtype)
    console.print(f"[bold]{QUESTION}[/bold]")
    for piece in model.stream(QUESTION, max_new_tokens=max_new_tokens):
        print(piece, end="", flush=True)
    print("\n")
    rows = compare(model, PROMPTS, ("plain", "auto"), max_new_tokens, repeats)
    console.print(comparison_table(rows))
