"""What the images say of themselves, and how large the operator's may be; docker is a stand-in here."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from fleet_operator import __version__

LABELS = {"title", "description", "licenses", "version", "revision", "created"}


def stages() -> dict[str, str]:
    """Return the instructions of each stage of the Dockerfile, by its name."""
    text = Path("Dockerfile").read_text()
    return dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.M | re.S))


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_an_image_has_the_labels_of_oci(image: str):
    labels = re.findall(r"org\.opencontainers\.image\.(\w+)=", stages()[image])
    assert sorted(labels) == sorted(LABELS)


def test_the_operators_image_begins_empty_and_is_tried_when_it_is_built():
    text = Path("Dockerfile").read_text()
    assert "\nFROM scratch AS operator\n" in text
    assert 'RUN ["fleetjob", "--version"]' in stages()["operator"]


def test_what_the_dockerfile_copies_is_sent_to_the_builder():
    sent = {line[1:] for line in Path(".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        path
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", Path("Dockerfile").read_text(), re.MULTILINE)
        for path in line.split()
    }
    assert len(copied) > 8
    left_out = {
        path for path in copied if not any(path == each or path.startswith(f"{each}/") for each in sent)
    }
    assert left_out == {".build/ca.cr[t]"}  # a pattern, for a file that need not be there


@pytest.mark.programs
@pytest.mark.parametrize(("size", "fits"), [("95138950", True), ("150000001", False)])
def test_an_operator_image_that_is_too_large_is_no_build(tmp_path: Path, size: str, fits: bool):
    docker = tmp_path / "docker"
    noted = tmp_path / "noted"
    docker.write_text(
        f'#!/bin/sh\nif [ "$1" = image ]; then echo {size}; else echo "$@ $VERSION" >>{noted}; fi\n'
    )
    docker.chmod(0o755)
    ended = subprocess.run(
        ["make", "image", f"DOCKER={docker}", "CA_BUNDLE="],
        env={**os.environ, "VERSION": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode == 0) is fits
    assert fits or "the operator image has 150 MB unpacked" in ended.stderr
    built = noted.read_text().splitlines()
    assert len(built) == 2
    assert all("--build-arg REVISION" in each and each.endswith(f" {__version__}") for each in built)
