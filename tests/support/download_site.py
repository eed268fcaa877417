"""A loopback HTTP server that stands in for the sites from which programs are downloaded."""

from __future__ import annotations

import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

ELF = b"\x7fELF"


class DownloadSite:
    """An HTTP server for files, which can also simulate failed downloads.

    Attributes
    ----------
    files : dict of str to bytes
        The content to serve, by path; any other path gets a 404.
    truncated : bool
        True to close each connection after half of the file.
    stalled : bool
        True to send nothing after half of the file until the server closes.
    asked : list of str
        The requested paths.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.truncated = self.stalled = False
        self.asked: list[str] = []
        self.closing = threading.Event()
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.answer(self)

            def log_message(self, *_: object) -> None:
                """Discard the message."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        body = self.files.get(request.path)
        if body is None:
            request.send_error(404)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: len(body) // 2] if self.truncated or self.stalled else body)
        if self.stalled:
            self.closing.wait(30)


def tar_gz(path: str, content: bytes) -> bytes:
    """Return a gzipped tar archive that contains a single file at the given path."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo(path)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()
