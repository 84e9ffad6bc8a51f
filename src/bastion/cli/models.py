"""`bastion models`: the targets known by a short name, and their drafters."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="List and fetch the models known by a short name.", no_args_is_help=True)


@app.command("list")
def list_command() -> None:
    """List the models, which of them are on this machine, and the drafters that come with the package."""
    from rich.console import Console
    from rich.table import Table

    from bastion.drafters.loading import SHIPPED
    from bastion.targets.zoo import list_models

    table = Table("name", "what", "licence", "download", "on this machine")
    for model in list_models():
        place = str(model.folder) if model.folder else "no: bastion models fetch " + model.name
        table.add_row(model.name, model.description, model.licence, f"{model.download_bytes / 1e6:.0f} MB", place)
    Console().print(table)
    drafters = Table("drafter", "for")
    for name, targets in SHIPPED.items():
        drafters.add_row(name, ", ".join(targets))
    Console().print(drafters)


@app.command("fetch")
def fetch_command(name: Annotated[str, typer.Argument(help="A name from `bastion models list`.")]) -> None:
    """Fetch a model, checked by its sha256; an interrupted download continues."""
    from bastion.targets import zoo

    with zoo.progress_bar() as progress:
        folder = zoo.fetch(name, progress)
    print(folder)
