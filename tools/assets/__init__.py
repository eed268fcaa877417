"""Installs programs that tests and the Makefile use: a control plane, kwok, kubectl, helm and others.

`find` says where they are. A program in the folder that ``KUBEBUILDER_ASSETS`` names comes first, then one
on ``PATH``, each only in a version that will do, then the user's cache. ``make assets`` fills that cache
before any test starts: `ensure` downloads the official file where ``tools/assets.lock`` has its sha256 and a
connection comes at once. Elsewhere it builds the program from its Go module, whose version is pinned as well.
Only the standard library is used, so that any Python from 3.11 on can run this.

Usage::

    python -m tools.assets                          # all but kueue and coscheduling, which take long to build
    python -m tools.assets kueue coscheduling       # those two, for `make test-kueue`
    export PATH="$(python -m tools.assets --path kind helm kubectl):$PATH"
    python -m tools.assets --pin                    # after a change of versions, where downloads work
"""

from tools.assets.ensure import ensure
from tools.assets.lookup import find
from tools.assets.programs import KUBERNETES, PROGRAMS, AssetError, MissingError

__all__ = ["KUBERNETES", "PROGRAMS", "AssetError", "MissingError", "ensure", "find"]
