"""What the processes of one job must have in common before they may train together.

An agreement is a flat mapping from the name of a fact to its text, so that two processes that differ can
say in what. A fingerprint is its digest: cheap to compare, equal on every platform and Python version.
"""

import hashlib
import json
from collections.abc import Mapping

__all__ = ["describe_difference", "facts_of_training", "fingerprint_of"]

_ABSENT = "nothing"
_OF_TRAINING = ("parameter ", "optimizer of ", "table ")


def facts_of_training(agreement: Mapping[str, str]) -> dict[str, str]:
    """Return what of an agreement is about the model and its optimizer, and not about the cluster."""
    return {fact: text for fact, text in agreement.items() if fact.startswith(_OF_TRAINING)}


def fingerprint_of(agreement: Mapping[str, str]) -> str:
    """Return the SHA-256 of an agreement in hexadecimal."""
    canonical = json.dumps(dict(agreement), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def describe_difference(ours: Mapping[str, str], theirs: Mapping[str, str], *, at_most: int = 3) -> str:
    """Say in one clause how two agreements differ; empty when they do not.

    Parameters
    ----------
    ours, theirs : mapping of fact to text
    at_most : int
        How many differing facts to spell out.

    Returns
    -------
    str
        ``trainers: 2 here, 3 there; …``, with the number of facts left out.
    """
    facts = [*ours, *(fact for fact in theirs if fact not in ours)]
    differing = [fact for fact in facts if ours.get(fact) != theirs.get(fact)]
    clauses = [
        f"{fact}: {ours.get(fact, _ABSENT)} here, {theirs.get(fact, _ABSENT)} there"
        for fact in differing[:at_most]
    ]
    if len(differing) > at_most:
        clauses.append(f"and {len(differing) - at_most} more")
    return "; ".join(clauses)
