"""The commands that use a cluster, such as ``fleetjob submit``, ``status`` and ``logs``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from fleet_operator.cli.options import (
    AllowUnknownFields,
    Context,
    Kubeconfig,
    Manifest,
    Name,
    Namespace,
    OptionalName,
    Output,
    Printed,
    Runs,
    Timeout,
    refusals_told,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from fleet_operator.client.session import Session

    Work = Callable[[Session], Awaitable[int]]

RoleName = Literal["pserver", "trainer"]
"""The values of `fleet_operator.api.Role`: importing that class would import the whole API package."""


def register(app: typer.Typer) -> None:
    """Register the commands with the application."""
    for command in (submit, status, list_jobs, logs, events, suspend, resume, scale, delete, ui):
        app.command(command.__name__.partition("_")[0])(command)


def submit(
    filename: Manifest,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the job has finished, and report its progress.")
    ] = False,
    timeout: Timeout = None,
    force_conflicts: Annotated[
        bool,
        typer.Option("--force-conflicts", help="Take over fields that others, such as kubectl, have set."),
    ] = False,
    allow_unknown_fields: AllowUnknownFields = False,
    output: Printed = Output.TEXT,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Create a job on the cluster, or update it to match its manifest.

    Exit status: 0 if the API server accepted it, and with --wait if the job succeeded; 1 if not, 2 if the
    manifest is not valid, 124 after --timeout. Ctrl-C ends the waiting, not the job.
    """
    from fleet_operator.cli.change import submit as work
    from fleet_operator.manifests.manifest import check_manifest, load_manifest

    with refusals_told(output):
        manifest = load_manifest(filename)
        check_manifest(manifest, allow_unknown_fields=allow_unknown_fields)
    document = manifest.document
    as_json = output is Output.JSON
    _exit_after(
        lambda session: work(
            session,
            document,
            wait=wait,
            timeout_seconds=timeout,
            as_json=as_json,
            force=force_conflicts,
            show=typer.echo,
            say=_aside if as_json else typer.echo,
        ),
        (kubeconfig, context, namespace or document["metadata"].get("namespace")),
    )


def status(
    name: OptionalName = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Keep watching: a live table, or lines without a terminal."),
    ] = False,
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="The jobs of all namespaces.")
    ] = False,
    output: Printed = Output.TEXT,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show the state of jobs, and the reason for it.

    With --watch and a name, the command ends with the job: exit status 0 if it succeeded, 1 if not.
    """
    from fleet_operator.cli.status import show_status, watch_status

    if name is not None and everywhere:
        raise typer.BadParameter("a JOB is in one namespace: give -n NAMESPACE, not --all-namespaces")
    as_json = output is Output.JSON
    if watch and as_json:
        raise typer.BadParameter("--watch shows text: leave out -o json, or use kubectl get -w -o json")

    def work(session: Session) -> Awaitable[int]:
        if watch:
            return watch_status(session, name, everywhere=everywhere, say=typer.echo)
        return show_status(session, name, everywhere=everywhere, as_json=as_json, say=typer.echo)

    _exit_after(work, (kubeconfig, context, namespace))


def list_jobs(
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="The jobs of all namespaces.")
    ] = False,
    output: Printed = Output.TEXT,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List the jobs of a namespace, like status without a JOB."""
    status(everywhere=everywhere, output=output, namespace=namespace, context=context, kubeconfig=kubeconfig)


def logs(
    name: Name,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Follow the logs through all restarts until the job has finished."
        ),
    ] = False,
    role: Annotated[RoleName | None, typer.Option(help="Only the replicas of this role.")] = None,
    index: Annotated[int | None, typer.Option(min=0, help="Only this replica of the role.")] = None,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Only this many of the last lines of each replica.")
    ] = None,
    since: Annotated[int | None, typer.Option(min=1, help="Only lines of the last NUMBER seconds.")] = None,
    container: Annotated[
        str | None, typer.Option("--container", "-c", help="The container. Default: the main one.")
    ] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Show the time of each line.")] = False,
    prefix: Annotated[bool, typer.Option(help="Show the replica that each line is from.")] = True,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show the merged logs of a job's replicas.

    With --follow, the logs of a restarted replica follow those of its previous life. The exit status is 1
    if no log could be read; the message gives the reason.
    """
    from fleet_operator.api import Role
    from fleet_operator.cli.logs import print_logs, print_with
    from fleet_operator.client.logs import Logs, Wanted

    if index is not None and role is None:
        raise typer.BadParameter(f"--index {index} of which role? Add --role trainer or --role pserver")
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    wanted = Wanted(None if role is None else Role(role), index, tail, since, container)
    show = print_with(prefixes=prefix, colour=colour, write=typer.echo, timestamps=timestamps)

    def work(session: Session) -> Awaitable[int]:
        reading = Logs(session, name, wanted, note=lambda line: _aside(f"-- {line}"))
        return print_logs(reading, follow=follow, show=show)

    _exit_after(work, (kubeconfig, context, namespace))


def events(
    name: Name,
    output: Printed = Output.TEXT,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show the events of a job."""
    from fleet_operator.cli.status import show_events

    as_json = output is Output.JSON
    _exit_after(
        lambda session: show_events(session, name, as_json=as_json, say=typer.echo),
        (kubeconfig, context, namespace),
    )


def suspend(
    name: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None
) -> None:
    """Stop all pods of a job until it is resumed."""
    from fleet_operator.cli.change import suspend as work

    _exit_after(
        lambda session: work(session, name, suspended=True, say=typer.echo), (kubeconfig, context, namespace)
    )


def resume(
    name: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None
) -> None:
    """Resume a suspended job."""
    from fleet_operator.cli.change import suspend as work

    _exit_after(
        lambda session: work(session, name, suspended=False, say=typer.echo), (kubeconfig, context, namespace)
    )


def scale(
    name: Name,
    trainers: Annotated[int, typer.Option(min=1, help="The number of trainers.")],
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Change the number of trainers of a job."""
    from fleet_operator.cli.change import scale as work

    _exit_after(
        lambda session: work(session, name, trainers=trainers, say=typer.echo),
        (kubeconfig, context, namespace),
    )


def delete(
    name: Name,
    wait: Annotated[bool, typer.Option("--wait", help="Return once all of its pods are gone.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Stop waiting after this many seconds (exit status 124).")
    ] = 120.0,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete a job and all that it owns."""
    from fleet_operator.cli.change import delete as work

    _exit_after(
        lambda session: work(session, name, wait=wait, timeout_seconds=timeout, say=typer.echo),
        (kubeconfig, context, namespace),
    )


def ui(
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 is any. Default: 8640."),
    ] = 8640,
    runs: Runs = None,
    cluster: Annotated[
        bool, typer.Option("--cluster/--no-cluster", help="Also show the jobs of the cluster.")
    ] = True,
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="The jobs of all namespaces.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show the jobs of this machine and of the cluster on a page in your browser, until Ctrl-C.

    The page shows states, curves, restarts, logs and comparisons. It changes nothing, and loads nothing from
    the network. Only the printed address, which contains a token, opens it.
    """
    import asyncio
    import contextlib
    import secrets

    from fleet_operator.cli.run_record import runs_folder
    from fleet_operator.cli.ui.cluster import ClusterJobs
    from fleet_operator.cli.ui.machine import LocalRuns
    from fleet_operator.cli.ui.server import UiServer, serve
    from fleet_operator.client.session import Where

    async def work() -> None:
        local = LocalRuns([runs_folder(os.environ), *(runs or ())])
        where = Where(kubeconfig, context, namespace)
        jobs = ClusterJobs(where, everywhere=everywhere) if cluster else None
        await serve(UiServer(local, jobs, token=secrets.token_urlsafe(24)), port, typer.echo)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(work())


def _exit_after(work: Work, where: tuple[Path | None, str | None, str | None]) -> NoReturn:
    """Run `work` in a session with the cluster, and exit with the status that it returns."""
    from fleet_operator.client.session import Where, in_session

    raise typer.Exit(in_session(Where(*where), work))


def _aside(line: str) -> None:
    typer.echo(line, err=True)
