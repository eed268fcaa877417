"""The options and arguments that commands share.

What defines the command line imports nothing that takes long, such as pydantic or aiohttp: each command
imports what it needs when it runs, so that help and completion are there at once.
"""

# No `from __future__ import annotations` here: Typer reads these annotations.
import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fleet_operator.cli.completion import complete_jobs


class Output(StrEnum):
    """For whom something is printed."""

    TEXT = "text"
    JSON = "json"


@contextlib.contextmanager
def refusals_told(output: Output) -> Iterator[None]:
    """Print an object for programs, too, where what a person gave cannot be used: a manifest, say."""
    from fleet_operator.errors import OperatorError

    try:
        yield
    except (OperatorError, OSError) as error:
        if output is Output.JSON:
            import json

            from fleet_operator.cli.result import refusal_to_json

            typer.echo(json.dumps(refusal_to_json(error)))
        raise


def _checked_name(name: str | None) -> str | None:
    from fleet_operator.api.rules import name_problem

    if name is not None and (expected := name_problem(name)) is not None:
        raise typer.BadParameter(f"{name!r} is no name of a FleetJob; expected {expected}")
    return name


Name = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="The FleetJob's name.", autocompletion=complete_jobs, callback=_checked_name
    ),
]
OptionalName = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]",
        help="One job in full.",
        autocompletion=complete_jobs,
        show_default=False,
        callback=_checked_name,
    ),
]
Manifest = Annotated[
    Path,
    typer.Option("--filename", "-f", metavar="FILE", help="The FleetJob's manifest; - is standard input."),
]
AllowUnknownFields = Annotated[
    bool,
    typer.Option(
        "--allow-unknown-fields",
        help="Warn of a template's fields that Kubernetes did not have when this program was made, instead of"
        " refusing them: for a newer cluster.",
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="The namespace. Default: the one of the kubeconfig's context."),
]
Context = Annotated[
    str | None, typer.Option(help="The kubeconfig's context. Default: its current one.", show_default=False)
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        help="The kubeconfig, which the package kubernetes reads. Default: KUBECONFIG, ~/.kube/config, or the"
        " pod's own account."
    ),
]
Printed = Annotated[Output, typer.Option("--output", "-o", help="text for people, json for programs.")]
Timeout = Annotated[float | None, typer.Option(min=0.1, help="Stop waiting after so many seconds.")]
