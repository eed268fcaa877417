"""Reads and checks the manifest files passed with ``-f``."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet_operator.api import parse_job
from fleet_operator.api.names import KIND
from fleet_operator.build import one_machine_sentence, overwritten_sentence, unlaunched_sentence
from fleet_operator.errors import InvalidJob, OperatorError, Problem
from fleet_operator.manifests.yaml_reader import YamlProblem, read_documents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fleet_operator.api import FleetJob
    from fleet_operator.manifests.yaml_reader import Node

STDIN = Path("-")
STDIN_NAME = "standard input"

MAX_BYTES = 3 << 20
"""The maximum size of a file: the API server accepts no larger request."""

CARET_COLUMNS = 60  # how many characters of a long line are shown on each side of an error


class ManifestError(OperatorError):
    """A file cannot be read as a single FleetJob.

    Attributes
    ----------
    sentence : str
        The problem, without its position.
    file : str
        The name of the file.
    line, column : int, optional
        The position of the problem, counted from 1.
    """

    exit_status = 2

    def __init__(self, sentence: str, file: str, line: int | None = None, column: int | None = None) -> None:
        self.sentence = sentence
        self.file = file
        self.line = line
        self.column = column
        super().__init__(sentence if line is None else f"{file}:{line}:{column}: {sentence}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A FleetJob read from a file.

    Attributes
    ----------
    source : str
        The name of the file.
    document : dict
        The FleetJob.
    """

    source: str
    document: dict[str, Any]
    _root: Node = field(repr=False)

    def located(self, error: InvalidJob) -> InvalidJob:
        """Return the error with a line number for each problem; a missing field gets its parent's line."""
        lines = dict(self._root.lines())
        problems = []
        for problem in error.problems:
            path = problem.path
            while path not in lines:
                path = path[: max(path.rfind("."), path.rfind("["), 0)]
            problems.append(problem._replace(file=self.source, line=lines[path] + 1))
        return InvalidJob(error.name, problems)


def load_manifest(path: Path) -> Manifest:
    """Return the FleetJob in a YAML or JSON file; ``-`` reads standard input.

    Values have the same meaning as for ``kubectl apply``. Duplicate keys are rejected.

    Raises
    ------
    ManifestError
        The file cannot be read, is too large, is not YAML, or does not contain exactly one object.
    """
    source = STDIN_NAME if path == STDIN else str(path)
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if path == STDIN else _read(path)
        text = data.decode("utf-8-sig") if len(data) <= MAX_BYTES else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ManifestError(
            f"cannot read {source}: {reason}; expected a FleetJob manifest", source
        ) from error
    if len(data) > MAX_BYTES:
        raise ManifestError(f"{source} is larger than {MAX_BYTES:,} bytes; expected a FleetJob", source)
    try:
        documents = read_documents(text)
    except YamlProblem as error:
        sentence = f"{error}\n{_with_caret(text.splitlines(), error.line, error.column)}"
        raise ManifestError(sentence, source, error.line + 1, error.column + 1) from error
    if len(documents) == 1 and isinstance(documents[0].value, dict):
        return Manifest(source, documents[0].value, documents[0])
    kinds = [
        str(each.value.get("kind")) if isinstance(each.value, dict) else type(each.value).__name__
        for each in documents
    ]
    raise ManifestError(f"{source} holds {', '.join(kinds) or 'nothing'}; expected one {KIND}", source)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _with_caret(lines: Sequence[str], line: int, column: int) -> str:
    """Return a line of a text with a caret below the given column."""
    shown = lines[line] if line < len(lines) else ""  # the position of an error may be past the last line
    start = max(0, column - CARET_COLUMNS)
    shown = "".join(each if each.isprintable() else " " for each in shown[start : column + CARET_COLUMNS])
    return f"    {shown}\n    {' ' * (column - start)}^"


@contextlib.contextmanager
def located(manifest: Manifest) -> Iterator[None]:
    """Add the manifest's line numbers to the problems of any InvalidJob that the ``with`` block raises."""
    try:
        yield
    except InvalidJob as error:
        raise manifest.located(error) from None


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr)


def check_manifest(
    manifest: Manifest, *, allow_unknown_fields: bool, warn: Callable[[str], None] = _warn
) -> FleetJob:
    """Parse a manifest's job as `check_document` does, adding line numbers to the problems."""
    with located(manifest):
        return check_document(manifest.document, allow_unknown_fields=allow_unknown_fields, warn=warn)


def check_document(
    document: Mapping[str, Any], *, allow_unknown_fields: bool, warn: Callable[[str], None] = _warn
) -> FleetJob:
    """Parse a job, and check its pod templates as Kubernetes would.

    Parameters
    ----------
    document : mapping
        The manifest.
    allow_unknown_fields : bool
        Whether unknown fields in a template only cause warnings: a newer cluster may know them.
    warn : callable
        Called with each warning, including those about variables that the operator overrides, and about a
        script without a launcher in a pod of several processes.

    Raises
    ------
    InvalidJob
        The manifest is invalid; the error has every problem.
    """
    from fleet_operator.manifests import pod_fields

    found = pod_fields.find(document)
    unknown = () if allow_unknown_fields else found.unknown
    problems: list[Problem] = []
    try:
        job = parse_job(document)
    except InvalidJob as error:
        name, problems = error.name, list(error.problems)
    else:
        name = job.name
    told = {problem.path for problem in problems}
    problems += [each for each in (*found.misfit, *unknown) if each.path not in told]
    if problems:
        newer = f", by the fields of Kubernetes {found.kubernetes} (for newer ones: --allow-unknown-fields),"
        raise InvalidJob(f"{name}{newer if unknown else ''}", problems)
    for problem in found.unknown:
        warn(f"{problem.path}: Kubernetes {found.kubernetes} has no such field, but a newer version may")
    for sentence in (overwritten_sentence(job), unlaunched_sentence(job), one_machine_sentence(job)):
        if sentence is not None:
            warn(sentence)
    return job
