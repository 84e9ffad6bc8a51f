"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bastion.model import Model

DEFAULT_TARGET = "smollm2-135m"

Target = Annotated[str, typer.Option(help="Hub id, model folder, .gguf file, or a name from `bastion models list`.")]
Drafter = Annotated[str, typer.Option(help="auto, ngram, or the folder or hub id of a DFlash checkpoint.")]
Policy = Annotated[
    str, typer.Option(help="plain, chain[:n], fixed:n, roofline[:n], profile[:n] or auto[:n]; n in nodes.")
]
Budget = Annotated[int | None, typer.Option(help="Most nodes of a tree, root not counted; the same as policy:n.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the first GPU, else the CPU.")]
EnableThinking = Annotated[bool, typer.Option("--enable-thinking", help="Passed to the chat template.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: bfloat16 where it is native.")]


def load(
    target: str,
    drafter: str,
    policy: str,
    budget: int | None,
    device: str | None,
    dtype: str | None,
    template_options: dict[str, Any] | None = None,
) -> Model:
    """Load a model as the options say; its notices go to standard error."""
    from rich.console import Console

    import bastion
    from bastion.errors import BastionError

    if budget is not None and ":" in policy:
        raise BastionError(f"the budget is given twice: --policy {policy} and --budget {budget}")
    spec = policy if budget is None else f"{policy}:{budget}"
    model = bastion.load(
        target, drafter=drafter, policy=spec, device=device, dtype=dtype, template_options=template_options
    )
    for notice in model.notices:
        Console(stderr=True, soft_wrap=True).print(f"bastion: {notice}", highlight=False, markup=False)
    return model


def split(text: str) -> list[str]:
    """The parts of a text that are separated by commas, without blanks; none of an empty text."""
    return [part.strip() for part in text.split(",")] if text.strip() else []


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Numbers separated by commas. Raises BastionError for what is none, or is there twice."""
    from bastion.errors import BastionError

    try:
        found = tuple(float(part) for part in split(text))
    except ValueError:
        found = ()
    if not found or len(set(found)) < len(found):
        raise BastionError(f"{option} must be different numbers separated by commas, as in 0,1; not {text!r}")
    return found
