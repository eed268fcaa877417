"""Agreements: the facts that must be equal in all processes of a job before they train together.

An agreement is a flat mapping from the name of a fact to its text, so two processes can report which facts
differ. A fingerprint is the digest of an agreement. It is cheap to compare, and identical on every platform
and Python version.
"""

import hashlib
import json
from collections.abc import Mapping

__all__ = ["describe_difference", "facts_of_training", "fingerprint_of"]

_ABSENT = "nothing"
_OF_TRAINING = ("parameter ", "optimizer of ", "table ")


def facts_of_training(agreement: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an agreement that describes the model and its optimizer, not the cluster."""
    return {fact: text for fact, text in agreement.items() if fact.startswith(_OF_TRAINING)}


def fingerprint_of(agreement: Mapping[str, str]) -> str:
    """Return the SHA-256 digest of an agreement in hexadecimal."""
    canonical = json.dumps(dict(agreement), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def describe_difference(ours: Mapping[str, str], theirs: Mapping[str, str], *, at_most: int = 3) -> str:
    """Return a clause that describes how two agreements differ, or an empty string if they are equal.

    Parameters
    ----------
    ours, theirs : mapping of fact to text
    at_most : int
        Maximum number of differing facts to spell out.

    Returns
    -------
    str
        Such as ``trainers: 2 here, 3 there; …``, ending with the number of omitted facts, if any.
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
