"""Where data connections reach a server: a TCP port and, for processes of this host, a Unix socket."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from fleet.errors import FleetError
from fleet.parameter_server.certificates import Certificates
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.transport.local_sockets import check_user, listen_here
from fleet.parameter_server.transport.sockets import hang_up, listen, tune
from fleet.parameter_server.transport.tls import TlsSocket
from fleet.process.connections import own

__all__ = ["DataPorts"]

_PAUSE_SECONDS: Final = 0.1
"""Before a listener that could not accept, for want of descriptors say, tries again."""
_log = logging.getLogger(__name__)


class DataPorts:
    """Accepts connections; each is greeted in a thread of its own.

    Parameters
    ----------
    address : str
        What to bind for TCP; see `bind_address`.
    settings : Settings
    greet : callable
        Gets a connected socket, and lets its session go on over it. What it raises is logged, and closes
        the socket.
    receive_bytes : int, optional
        Size of the kernel's receive buffers, where the settings leave them to the system.
    certificates : Certificates, optional
        What comes over TCP is encrypted with them; their handshake is the first thing for `greet` to do.
    """

    def __init__(
        self,
        address: str,
        settings: Settings,
        greet: Callable[[socket.socket], None],
        receive_bytes: int | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        self.port = 0
        """The TCP port; 0 before `start`."""
        self.name = ""
        """The name of the Unix socket; empty where there is none."""
        self._address = address
        self._settings = settings
        self._greet = greet
        self._receive_bytes = receive_bytes
        self._certificates = certificates
        self._listeners: list[socket.socket] = []
        self._closing = False

    def start(self) -> None:
        """Begin to accept connections.

        Raises
        ------
        OSError
            The address cannot be bound.
        """
        listener = listen(self._address)
        self.port = listener.getsockname()[1]
        self._listeners.append(listener)
        if self._settings.transport != "tcp":
            try:
                here, self.name = listen_here()
                self._listeners.append(here)
            except OSError as error:
                _log.debug("data comes over TCP from processes of this host too: %s", error)
        for each in self._listeners:
            threading.Thread(target=self._accept, args=(each,), name="fleet-accept", daemon=True).start()

    def close(self) -> None:
        """Accept nothing more; safe to repeat."""
        self._closing = True
        for listener in self._listeners:
            hang_up(listener)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, address = listener.accept()
            except OSError as error:
                if self._closing:
                    return
                _log.warning("cannot accept a data connection: %s; trying again", error)
                time.sleep(_PAUSE_SECONDS)
                continue
            whence = address[0] if connected.family != socket.AF_UNIX else "this host"
            try:
                threading.Thread(
                    target=self._let_in, args=(connected, whence), name="fleet-greet", daemon=True
                ).start()
            except RuntimeError as error:  # no thread is left for the moment: who has come may come again
                _log.warning("cannot take a data connection from %s: %s", whence, error)
                connected.close()

    def _let_in(self, connected: socket.socket, whence: str) -> None:
        try:
            if connected.family == socket.AF_UNIX:
                own(connected)
                check_user(connected)
            else:
                tune(connected, self._settings.socket_buffer_bytes)
                if self._receive_bytes and self._settings.socket_buffer_bytes is None:
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
                if self._certificates is not None:
                    connected = TlsSocket(connected, self._certificates)
            self._greet(connected)
        except PermissionError as error:  # who has found out the same goes over TCP
            _log.debug("no memory is shared: %s", error)
            connected.close()
        except (FleetError, OSError) as error:
            if not self._closing:
                _log.warning("refused a data connection from %s: %s", whence, error)
            connected.close()
