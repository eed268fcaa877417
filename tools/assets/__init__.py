"""Installs programs that tests and the Makefile use: a control plane, kwok, kubectl, helm and others.

`find` returns the paths of the programs. It searches the folder ``KUBEBUILDER_ASSETS``, then ``PATH``, each
only for suitable versions, and then the user's cache. ``make assets`` fills the cache before any test starts:
`ensure` downloads the official file if ``tools/assets.lock`` contains its SHA-256 digest and a connection
succeeds quickly. Otherwise it builds the program from its Go module, whose version is pinned as well. Only
the standard library is used, so that any Python from 3.11 on can run this.

Usage::

    python -m tools.assets                          # all except kueue and coscheduling (slow to build)
    python -m tools.assets kueue coscheduling       # those two, for `make test-kueue`
    export PATH="$(python -m tools.assets --path kind helm kubectl):$PATH"
    python -m tools.assets --pin                    # after a change of versions
"""

from tools.assets.ensure import ensure
from tools.assets.lookup import find
from tools.assets.programs import KUBERNETES, PROGRAMS, AssetError, MissingError

__all__ = ["KUBERNETES", "PROGRAMS", "AssetError", "MissingError", "ensure", "find"]
