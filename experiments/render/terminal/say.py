"""What a command says in a line."""

from __future__ import annotations

import typer

from meshcast.hardware.errors import to_line


def say(line: str, err: bool = False) -> None:
    """Prints a line, whatever the names in it hold. err: on stderr."""
    typer.echo(to_line(line), err=err)
