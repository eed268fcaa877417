"""Manifests as files: what ``-f`` names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fleet_operator.api import parse_job
from fleet_operator.api.names import KIND
from fleet_operator.build import one_machine_sentence, overwritten_sentence, unlaunched_sentence
from fleet_operator.errors import InvalidJob, OperatorError, Problem

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

STDIN = Path("-")


class ManifestError(OperatorError):
    """A file cannot be read as one FleetJob."""

    exit_status = 2


class _Loader(yaml.SafeLoader):
    """Reads only what JSON has as well; a date without quotes is text, as it is to kubectl."""


_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or not tag.endswith((":binary", ":set", ":timestamp"))
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_manifest(path: Path) -> dict[str, Any]:
    """Return the FleetJob in a YAML or JSON file, or on standard input for ``-``.

    Raises
    ------
    ManifestError
        The file cannot be read, is not YAML, or does not hold one object.
    """
    try:
        text = sys.stdin.read() if path == STDIN else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ManifestError(f"cannot read {path}: {reason}; expected a FleetJob manifest") from error
    try:
        documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of a number too long
        raise ManifestError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if len(documents) == 1 and isinstance(documents[0], dict):
        return documents[0]
    kinds = [str(each.get("kind")) if isinstance(each, dict) else type(each).__name__ for each in documents]
    raise ManifestError(f"{path} holds {', '.join(kinds) or 'nothing'}; expected one {KIND}")


def check_manifest(document: dict[str, Any], *, allow_unknown_fields: bool) -> FleetJob:
    """Return the job that a manifest describes, looking at its templates as Kubernetes would.

    Variables that a template sets in vain, and a script without a launcher in a pod of several slots, are
    warned of on standard error.

    Parameters
    ----------
    document : dict
        The manifest.
    allow_unknown_fields : bool
        Whether fields of a template that the known version of Kubernetes does not have are let pass, with a
        warning on standard error.

    Raises
    ------
    InvalidJob
        With every problem of the manifest.
    """
    from fleet_operator.cli import pod_fields

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
        warning = f"warning: {problem.path}: Kubernetes {found.kubernetes} has no such field; a newer one may"
        print(warning, file=sys.stderr)
    for sentence in (overwritten_sentence(job), unlaunched_sentence(job), one_machine_sentence(job)):
        if sentence is not None:
            print(f"warning: {sentence}", file=sys.stderr)
    return job
