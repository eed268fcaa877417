"""The options and arguments of the commands, and shell completion of job names.

Modules that define the command line import nothing slow, such as pydantic or aiohttp: each command imports
what it needs when it runs, so that help and completion are immediate.
"""

# No `from __future__ import annotations` here: Typer reads these annotations.

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from fleet_operator.client.session import Session

PATIENCE_SECONDS = 2.0
"""How long shell completion waits for the cluster, not including a credential program."""


def complete_jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the job names that begin with `incomplete`; empty if the cluster does not respond."""
    import asyncio

    from fleet_operator.client.session import Where, in_session

    async def names(session: "Session") -> list[str]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return [job["metadata"]["name"] for job in await session.jobs()]

    given = ctx.params
    file = given.get("kubeconfig")
    where = Where(Path(file) if file else None, given.get("context"), given.get("namespace"))
    try:
        return [name for name in in_session(where, names) if name.startswith(incomplete)]
    except (OperatorError, OSError):
        return []


class Output(StrEnum):
    """The output format: text for people, or JSON for programs."""

    TEXT = "text"
    JSON = "json"


@contextlib.contextmanager
def refusals_told(output: Output) -> Iterator[None]:
    """Re-raise errors from the ``with`` block, after printing them as JSON if the output is JSON."""
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
        raise typer.BadParameter(f"{name!r} is not a valid name of a FleetJob; expected {expected}")
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
        help="Warn about template fields that are unknown to the Kubernetes version of this program, instead"
        " of refusing them; for newer clusters.",
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
Timeout = Annotated[float | None, typer.Option(min=0.1, help="Stop waiting after this many seconds.")]


RunPrinted = Annotated[
    Output,
    typer.Option(
        "--output",
        "-o",
        help="text for people; json for programs: one object on standard output, everything else on"
        " standard error.",
    ),
]
LogDir = Annotated[
    Path | None, typer.Option(help="The folder of the replicas' logs. Default: logs/JOB-TIME-PID.")
]
Workdir = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        file_okay=False,
        resolve_path=True,
        help="The replicas' working directory. Default: a template's workingDir if it is a folder here,"
        " else the root of the manifest's project, or the manifest's folder if the script is only there.",
    ),
]
Follow = Annotated[bool, typer.Option("--follow", help="Also print the output of trainer 0, with times.")]
TensorBoard = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        metavar="DIR",
        help="Write the trainers' losses, speeds and metrics for TensorBoard, to a folder in DIR.",
    ),
]
Volumes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=FOLDER",
        help="A folder on this machine that replaces a volume; the name checkpoint stands for "
        "spec.checkpoint. In the command, the args and the variables, paths in the volume's mount are "
        "replaced by paths in the folder.",
    ),
]
EnvFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Variables of the replicas, one NAME=VALUE per line, instead of Secrets and ConfigMaps."
        " Values in the manifest take precedence.",
    ),
]
RunTimeout = Annotated[
    float | None, typer.Option(min=0.1, help="Stop the run after this many seconds (exit status 124).")
]
NoRestart = Annotated[
    bool,
    typer.Option(
        "--no-restart",
        help="The first failure fails the job, whatever its failurePolicy is; useful while debugging.",
    ),
]
Runs = Annotated[
    list[Path] | None,
    typer.Option(
        exists=True,
        file_okay=False,
        metavar="FOLDER",
        help="A log folder of `fleetjob run`, or a folder that contains such folders, for runs that are not"
        " among this user's recent ones.",
    ),
]
