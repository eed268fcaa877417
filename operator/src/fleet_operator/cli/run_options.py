"""The options of ``fleetjob run``. Imports nothing that takes long, as `options`."""

# No `from __future__ import annotations` here: Typer reads these annotations.
from pathlib import Path
from typing import Annotated

import typer

from fleet_operator.cli.options import Output

RunPrinted = Annotated[
    Output,
    typer.Option(
        "--output",
        "-o",
        help="text for people; json for programs: one object on standard output, all else on standard error.",
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
Follow = Annotated[bool, typer.Option("--follow", help="Show what trainer 0 prints, with the times.")]
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
        help="A folder of this machine in the place of a volume; checkpoint is spec.checkpoint. Paths in"
        " its mount become paths in the folder, in the command, the args and the variables.",
    ),
]
EnvFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Variables of the replicas, a line NAME=VALUE each, in the place of Secrets and ConfigMaps."
        " The manifest's own values count before them.",
    ),
]
RunTimeout = Annotated[
    float | None, typer.Option(min=0.1, help="Stop the run after so many seconds (exit status 124).")
]
NoRestart = Annotated[
    bool,
    typer.Option(
        "--no-restart",
        help="The first failure fails the job, whatever its failurePolicy says: for finding mistakes.",
    ),
]
