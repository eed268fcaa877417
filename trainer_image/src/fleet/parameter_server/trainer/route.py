"""The way to a server's data port: its Unix socket on this host, else TCP."""

import logging
import socket

from fleet.errors import ConfigurationError
from fleet.parameter_server.certificates import Certificates
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.transport.handshake import GREETING_SECONDS
from fleet.parameter_server.transport.sockets import dial, dial_here
from fleet.parameter_server.transport.tls import TlsSocket
from fleet.parameter_server.waiting import split_endpoint

__all__ = ["Route"]

_log = logging.getLogger(__name__)


class Route:
    """How one server is reached.

    Parameters
    ----------
    endpoint : str
        Of its control service.
    port : int
        Its data port.
    name : str
        The Unix socket on which it listens for processes of its host; empty for none.
    settings : Settings
    key : bytes
        The job's, which either end proves to the other one; empty where there is none.
    certificates : Certificates, optional
        With which what goes over TCP is encrypted.
    """

    def __init__(
        self,
        endpoint: str,
        port: int,
        name: str,
        settings: Settings,
        key: bytes = b"",
        certificates: Certificates | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.port = port
        self.key = key
        self._name = name if settings.transport != "tcp" else ""
        self._settings = settings
        self._certificates = certificates
        self._reached_here = False

    @property
    def stays_here(self) -> bool:
        """Whether the server is on this host, as far as is known."""
        return bool(self._name)

    def dial(self) -> socket.socket:
        """Connect by the Unix socket where the server is on this host, else by TCP.

        Raises
        ------
        OSError
            Nobody listens, or the time is over.
        ConfigurationError
            The settings want shared memory, and the server is elsewhere.
        """
        settings = self._settings
        timeout_seconds = min(GREETING_SECONDS, settings.deadline_seconds)
        if self._name:
            try:
                connected = dial_here(
                    self._name,
                    timeout_seconds=timeout_seconds,
                    buffer_bytes=settings.socket_buffer_bytes,
                )
            except OSError as error:
                if self._reached_here:
                    raise
                self._stay_with_tcp(str(error))
            else:
                self._reached_here = True
                return connected
        elif settings.transport == "shared_memory":
            raise self.not_here("it listens for no process of its host")
        host, _ = split_endpoint(self.endpoint)
        connected = dial(
            host, self.port, timeout_seconds=timeout_seconds, buffer_bytes=settings.socket_buffer_bytes
        )
        return connected if self._certificates is None else TlsSocket(connected, self._certificates, host)

    def not_here(self, reason: str) -> ConfigurationError:
        """Return the error of a server that shares no memory although the settings want it."""
        return ConfigurationError(
            f"strategy.transport is 'shared_memory', and parameter server {self.endpoint} cannot be reached "
            f"so: {reason}; expected a server on this host, of the same user, with the same strategy. With "
            "'auto' what is elsewhere is reached over TCP"
        )

    def _stay_with_tcp(self, reason: str) -> None:
        if self._settings.transport == "shared_memory":
            raise self.not_here(reason)
        _log.debug("parameter server %s is not on this host (%s): data goes over TCP", self.endpoint, reason)
        self._name = ""
