"""What a shell offers when a name is begun: the jobs of the namespace, if the cluster says so at once."""

# No `from __future__ import annotations` here: Typer reads these annotations.
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from fleet_operator.cli.session import Session

PATIENCE_SECONDS = 2.0
"""How long a person who has pressed Tab waits for the cluster; a credential program's time comes on top."""


def complete_jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of jobs that begin so; none where the cluster does not answer."""
    import asyncio

    from fleet_operator.cli.session import Where, in_session

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
