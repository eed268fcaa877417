"""The ``fleetjob`` command line, also ``kubectl fleet``: local commands and error messages."""

# No `from __future__ import annotations` here: Typer reads these annotations.
import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fleet_operator import __version__
from fleet_operator.cli.options import (
    AllowUnknownFields,
    EnvFiles,
    Follow,
    LogDir,
    Manifest,
    NoRestart,
    Output,
    Printed,
    RunPrinted,
    RunTimeout,
    TensorBoard,
    Volumes,
    Workdir,
    refusals_told,
)
from fleet_operator.cli.remote import register
from fleet_operator.errors import OperatorError

PLUGIN = "kubectl-fleet"  # the plugin that kubectl runs for `kubectl fleet`
UNKNOWN_UID = "00000000-0000-0000-0000-000000000000"

app = typer.Typer(
    name="fleetjob",
    help="Train PyTorch models with parameter servers or collectively, from one manifest.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fleetjob {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Train PyTorch models with parameter servers or collectively, from one manifest."""


@app.command()
def run(
    filename: Manifest,
    output: RunPrinted = Output.TEXT,
    log_dir: LogDir = None,
    workdir: Workdir = None,
    follow: Follow = False,
    tensorboard: TensorBoard = None,
    volume: Volumes = None,
    env_file: EnvFiles = None,
    timeout: RunTimeout = None,
    no_restart: NoRestart = False,
    allow_unknown_fields: AllowUnknownFields = False,
) -> None:
    """Run a job on this machine, as a cluster would.

    Exit status: 0 if the job succeeds, 1 if it fails, 2 if the manifest is not valid, 124 after --timeout,
    130 after Ctrl-C and 143 after SIGTERM. No process of the job outlives this command.
    """
    from fleet_operator.cli.command import run_command
    from fleet_operator.cli.given import read_given
    from fleet_operator.manifests.manifest import check_manifest, load_manifest, located

    with refusals_told(output):
        manifest = load_manifest(filename)
        job = check_manifest(manifest, allow_unknown_fields=allow_unknown_fields)
        own = f"{job.name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}"
        with located(manifest):
            status = run_command(
                job,
                manifest=filename,
                workdir=workdir,
                logs=(log_dir or Path("logs") / own).absolute(),
                as_json=output is Output.JSON,
                timeout_seconds=timeout,
                follow=follow,
                tensorboard=tensorboard,
                given=read_given(volume or (), env_file or ()),
                no_restart=no_restart,
            )
    raise typer.Exit(status)


@app.command()
def render(filename: Manifest) -> None:
    """Print the objects that the operator creates for a job, in the order of their creation.

    Only the operator of a cluster knows whether it creates NetworkPolicies, and who may read metrics.
    """
    import yaml

    from fleet_operator.api import parse_job
    from fleet_operator.build import ClusterHosts, build_extras, build_pod, build_service
    from fleet_operator.manifests.manifest import load_manifest, located
    from fleet_operator.plan.model import Attempt

    manifest = load_manifest(filename)
    with located(manifest):
        job = parse_job(manifest.document)
    metadata = job.metadata.model_copy(update={"uid": job.metadata.uid or UNKNOWN_UID})
    job = job.model_copy(update={"metadata": metadata})
    hosts = ClusterHosts(job)
    extras = build_extras(job, life=0, metrics_open=True)
    manifests = [build_service(job), *(extra.manifest for extra in extras)]
    for role in job.roles:
        manifests += [build_pod(job, role, index, Attempt(), hosts) for index in range(job.replicas(role))]
    copies = json.loads(json.dumps(manifests))  # without copies, PyYAML would write shared objects as aliases
    typer.echo(yaml.safe_dump_all(copies, sort_keys=False, width=110), nl=False)


@app.command()
def validate(
    filename: Manifest, output: Printed = Output.TEXT, allow_unknown_fields: AllowUnknownFields = False
) -> None:
    """Check a manifest as the API server would; every problem is shown with its field and its line.

    Values have the same meaning as in kubectl apply; a duplicate key is a problem too. Template fields are
    those of the Kubernetes version that this program is tested with.
    """
    from fleet_operator.manifests.manifest import check_manifest, load_manifest

    if output is Output.TEXT:
        manifest = load_manifest(filename)
        job = check_manifest(manifest, allow_unknown_fields=allow_unknown_fields)
        typer.echo(f"{manifest.source}: FleetJob {job.name} is valid")
        return
    warnings = list[str]()
    with refusals_told(output):
        job = check_manifest(
            load_manifest(filename), allow_unknown_fields=allow_unknown_fields, warn=warnings.append
        )
    typer.echo(json.dumps({"state": "Valid", "name": job.name, "problems": [], "warnings": warnings}))


@app.command()
def operator() -> None:
    """Run the operator against the cluster that KUBECONFIG or the pod's service account names."""
    from fleet_operator.startup import run_operator

    raise typer.Exit(run_operator())


register(app)


def main() -> NoReturn:
    """Run the command line; report a user's mistake in one sentence, without a traceback."""
    try:
        app(prog_name="kubectl fleet" if Path(sys.argv[0]).name == PLUGIN else None)
    except OperatorError as error:
        _fail(str(error), error.exit_status)
    except OSError as error:
        _fail(f"{error.strerror}: {error.filename}" if error.filename else str(error), 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        if os.environ.get("FLEETJOB_DEBUG"):
            raise
        hint = "FLEETJOB_DEBUG=1 shows where"
        _fail(f"internal error in fleetjob: {type(error).__name__}: {error} ({hint})", 1)
    sys.exit(0)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"fleetjob: {message}", err=True)
    sys.exit(status)
