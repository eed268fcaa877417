"""A proxy like those of corporate networks, for HTTP CONNECT and SOCKS 5."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SOCKS = 5


class Tunnel:
    """A proxy that resolves every host name to this machine.

    `asked` contains the addresses that clients requested, in order.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Tunnel]:
        """Run the proxy on a free loopback port within the block."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            first = await reader.readexactly(1)
            greet = self._greet_socks if first[0] == SOCKS else self._greet_http
            host, port = await greet(reader, writer)
            self.asked.append(f"{host}:{port}")
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_carry(reader, far_writer), _carry(far_reader, writer))
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _greet_http(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[str, int]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        host, _, port = head.split()[1].rpartition(":")
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        return host.strip("[]"), int(port)

    async def _greet_socks(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[str, int]:
        await reader.readexactly((await reader.readexactly(1))[0])  # the client's authentication methods
        writer.write(bytes([SOCKS, 0]))
        *_, kind = await reader.readexactly(4)
        if kind == 1:
            host = ".".join(map(str, await reader.readexactly(4)))
        else:
            host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
        port = int.from_bytes(await reader.readexactly(2), "big")
        writer.write(bytes([SOCKS, 0, 0, 1, 0, 0, 0, 0, 0, 0]))
        return host, port


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while received := await source.read(1 << 16):
            target.write(received)
            await target.drain()
    target.close()
