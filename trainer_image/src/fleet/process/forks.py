"""Sockets that forked children close: with a copy open, peers would never see that the parent has died."""

import os
import socket
import weakref

__all__ = ["own"]

_ours: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def own(connection: socket.socket) -> socket.socket:
    """Keep a socket out of forked children: they close their copies."""
    _ours.add(connection)
    return connection


def _close_in_child() -> None:
    for connection in list(_ours):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
