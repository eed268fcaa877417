"""failurePolicy.rules: which rule, if any, a failure falls under. The first one that matches decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_operator.plan.failure import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleet_operator.api import FailureRule
    from fleet_operator.plan.failure import Failure

__all__ = ["first_match"]

_MUST_BE_NAMED = (Kind.DISRUPTION, Kind.BAD_CONFIGURATION, Kind.PERMANENT, Kind.REPEATED)


def first_match(rules: Sequence[FailureRule], failure: Failure) -> int | None:
    """Return the index of the rule that a failure falls under, or None.

    Exit codes are the main container's. A disruption, a configuration that was refused and a script that
    cannot run have a meaning of their own: only a rule that names their exit code or their reason is about
    them, one that merely names a role is not.
    """
    return next((index for index, rule in enumerate(rules) if _matches(rule, failure)), None)


def _matches(rule: FailureRule, failure: Failure) -> bool:
    if rule.role not in (None, failure.replica.role):
        return False
    named = rule.on_exit_codes is not None or rule.on_reason is not None
    if failure.kind in _MUST_BE_NAMED and not named:
        return False
    if rule.on_exit_codes is not None and failure.exit_code not in rule.on_exit_codes:
        return False
    return rule.on_reason is None or not failure.reasons.isdisjoint(rule.on_reason)
