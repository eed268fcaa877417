"""The one door to this process's environment, so that the pure folders need none."""

import os
from collections.abc import Mapping

__all__ = ["process_environment"]


def process_environment() -> Mapping[str, str]:
    """Return the environment of this process as it is now."""
    return os.environ
