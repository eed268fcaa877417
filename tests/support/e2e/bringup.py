"""The cluster for end-to-end tests: the one that ``KUBECONFIG`` selects, or one that kind creates.

Creating the cluster is retried once, because it depends on the disks and networks of a busy machine. Tests
are never retried.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.e2e.command import CommandError, run, run_visibly

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CREATE_SECONDS = 600.0
TRIES = 2


@dataclass(frozen=True)
class Programs:
    """The paths of the programs that create and access clusters."""

    kubectl: Path
    helm: Path
    kind: Path


@contextlib.contextmanager
def cluster(programs: Programs, folder: Path, environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yield the kubeconfig of a cluster that is reachable.

    Raises
    ------
    CommandError
        The cluster of ``KUBECONFIG`` does not respond, or kind could not create one.
    """
    given = environ.get("KUBECONFIG")
    if given:
        kubeconfig = Path(given).absolute()
        run(programs.kubectl, "--kubeconfig", kubeconfig, "get", "--raw", "/readyz", timeout=60)
        yield kubeconfig
        return
    name, kubeconfig = f"fleet-e2e-{secrets.token_hex(3)}", folder / "kubeconfig"
    try:
        _create(programs.kind, name, kubeconfig, environ)
        yield kubeconfig
    finally:
        _delete(programs.kind, name, kubeconfig)


def _create(kind: Path, name: str, kubeconfig: Path, environ: Mapping[str, str]) -> None:
    image = environ.get("KIND_NODE_IMAGE")
    for attempt in range(1, TRIES + 1):
        try:
            run_visibly(
                kind,
                *("create", "cluster", "--name", name, "--kubeconfig", kubeconfig, "--wait", "180s"),
                *(("--image", image) if image else ()),
                timeout=CREATE_SECONDS,
            )
        except CommandError as error:
            print(f"kind did not make a cluster, try {attempt} of {TRIES}: {error}", flush=True)
            _delete(kind, name, kubeconfig)
            if attempt == TRIES:
                raise
        else:
            return


def _delete(kind: Path, name: str, kubeconfig: Path) -> None:
    run(kind, "delete", "cluster", "--name", name, "--kubeconfig", kubeconfig, timeout=180)
