"""The project's two images: building them, and loading them onto the nodes of a cluster."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.e2e.command import CommandError, run, run_visibly

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.e2e.kubectl import Kubectl

BUILD_SECONDS = 1800.0
LOAD_SECONDS = 1500.0
"""Enough for the 6 GB of the trainer image on a busy machine, which writes 30 MB per second."""


@dataclass(frozen=True)
class Images:
    """The names of the project's images in the cluster."""

    operator: str
    trainer: str


def build(images: Images) -> None:
    """Build both images as `make image` does, with the environment's ``BASE_IMAGE`` and ``CA_BUNDLE``."""
    run_visibly(
        "make",
        "image",
        f"OPERATOR_IMAGE={images.operator}",
        f"TRAINER_IMAGE={images.trainer}",
        timeout=BUILD_SECONDS,
    )


def load(images: Images, kubectl: Kubectl, environ: Mapping[str, str] = os.environ) -> None:
    """Load both images onto every node.

    On a cluster that kind has not created, the command ``E2E_LOAD_IMAGE`` loads one image, which is its last
    argument. Set it to ``true`` if the cluster can pull the images.

    Raises
    ------
    CommandError
        kind has not created the nodes and no command is set, or an image could not be loaded.
    """
    command = environ.get("E2E_LOAD_IMAGE")
    nodes = {node["metadata"]["name"] for node in kubectl.get("nodes")}
    if not command and (strange := nodes - _kind_nodes()):
        raise CommandError(
            f"the nodes {', '.join(sorted(strange))} are not containers of kind on this machine: say by "
            "E2E_LOAD_IMAGE which command puts an image on them (true, if they can pull it)"
        )
    for image in (images.operator, images.trainer):
        started = time.monotonic()
        if command:
            run_visibly(*shlex.split(command), image, timeout=LOAD_SECONDS)
        else:
            for node in sorted(nodes):
                _load_into(node, image)
        print(f"{image} is on the nodes after {time.monotonic() - started:.0f} s", flush=True)


def _kind_nodes() -> set[str]:
    label = "label=io.x-k8s.kind.cluster"
    return set(run("docker", "ps", "--filter", label, "--format", "{{.Names}}", timeout=60).split())


def _load_into(node: str, image: str) -> None:
    """Load an image into containerd on a node; try twice, because an interrupted import can be continued."""
    if _is_on(node, image):
        return
    if problem := _stream_into(node, image):
        print(f"{problem}; trying once more", flush=True)
        if problem := _stream_into(node, image):
            raise CommandError(problem)


def _stream_into(node: str, image: str) -> str:
    """Stream an image into containerd on a node, without an archive on disk; return what failed, or ""."""
    import_it = [
        "docker",
        "exec",
        "-i",
        node,
        "ctr",
        "-n",
        "k8s.io",
        "images",
        "import",
        "--all-platforms",
        "-",
    ]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE, stderr=said) as saving,
        subprocess.Popen(import_it, stdin=saving.stdout, stdout=subprocess.DEVNULL, stderr=said) as importing,
    ):
        assert saving.stdout is not None
        saving.stdout.close()  # only the import's copy stays open, so docker ends if the import does
        try:
            statuses = importing.wait(LOAD_SECONDS), saving.wait(60)
        except subprocess.TimeoutExpired:
            importing.kill()
            saving.kill()
            raise CommandError(f"{image} was not on {node} after {LOAD_SECONDS:.0f} s") from None
        if statuses != (0, 0):
            said.seek(0)
            free = shutil.disk_usage(Path.cwd()).free / 1e9
            return (
                f"{image} could not be loaded into {node}: docker save ended with {statuses[1]}, ctr with "
                f"{statuses[0]}: {said.read().strip() or 'without a word'} ({free:.0f} GB of disk are free)"
            )
    return ""


def _is_on(node: str, image: str) -> bool:
    """Return whether a node has this exact image, identified by its docker ID."""
    identity = run("docker", "image", "inspect", "--format", "{{.Id}}", image, timeout=60).strip()
    ctr = ("docker", "exec", node, "ctr", "-n", "k8s.io")
    for line in run(*ctr, "images", "ls", timeout=60).splitlines():
        name, _, digest, *_ = [*line.split(), "", "", ""]
        if name.removeprefix("docker.io/library/") == image:
            manifest = json.loads(run(*ctr, "content", "get", digest, timeout=60))
            return bool(manifest.get("config", {}).get("digest") == identity)
    return False
