"""Namespaces that are deleted after each test."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.e2e.kubectl import Kubectl


@contextlib.contextmanager
def fresh_namespace(cluster: Kubectl, name: str) -> Iterator[Kubectl]:
    """Yield a `Kubectl` for a new namespace, which is deleted afterwards."""
    cluster("create", "namespace", name)
    try:
        kubectl = cluster.within(name)
        kubectl(
            "wait", "--for=create", "serviceaccount/default", "configmap/kube-root-ca.crt", "--timeout=30s"
        )
        yield kubectl
    finally:
        cluster("delete", "namespace", name, timeout=180)
