"""An HTTP server for one page, reachable only from this machine."""

from __future__ import annotations

import json
import socketserver
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import parse_qs, urlsplit

from meshcomm import __version__
from meshcomm.errors import ViewError
from meshcomm.view.page import document
from meshcomm.view.run import run_news

ADDRESS: Final = "127.0.0.1"
# In a DNS rebinding attack, another site's name resolves to 127.0.0.1, and the request has that name as its Host.
_NAMES: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@final
class Server(ThreadingHTTPServer):
    """Serves only `/`, `/facts.json` and `/run.json`, on 127.0.0.1.

    facts: the result of `page_facts`. folder: the run's folder, which may not exist yet, or None without training.
    port: 0 selects a free port. Only GET and HEAD requests whose Host is a name of this machine are served.
    Raises ViewError if the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, facts: dict[str, Any], folder: Path | None, port: int = 0) -> None:
        self.folder = folder
        self.page = document()
        self.facts = json.dumps(facts, separators=(",", ":"), allow_nan=False).encode()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ViewError(
                f"port {port} cannot be used: {(getattr(error, 'strerror', None) or str(error)).lower()}",
                given=f"--port {port} on {ADDRESS}",
                expected="a port from 1024 to 65535 that no other program uses",
                hint="leave out --port to use a free one",
            ) from None

    def server_bind(self) -> None:
        """Bind like HTTPServer, but without looking up the name of 127.0.0.1."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, int(self.server_address[1])

    @property
    def url(self) -> str:
        """The URL of the page."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a browser that disconnects during a response."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = f"meshcomm/{__version__}"
    sys_version = ""
    # Connections that send no request for this many seconds are closed.
    timeout = 30

    def do_GET(self) -> None:
        if not self._from_here():
            self._answer(
                HTTPStatus.MISDIRECTED_REQUEST,
                "text/plain",
                b"Host is not a name of this machine: open http://127.0.0.1:PORT/\n",
            )
            return
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._answer(HTTPStatus.BAD_REQUEST, "text/plain", b"not a valid URL\n")
            return
        if url.path == "/":
            page = self.server.page
            more = {"Content-Security-Policy": page.policy, "X-Frame-Options": "DENY"}
            self._answer(HTTPStatus.OK, "text/html", page.html.encode(), more)
        elif url.path == "/facts.json":
            self._answer(HTTPStatus.OK, "application/json", self.server.facts)
        elif url.path == "/run.json":
            self._run(parse_qs(url.query))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is / and nothing else\n")

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET or HEAD\n", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _run(self, query: dict[str, list[str]]) -> None:
        known, offset = query.get("id", [""])[0], query.get("offset", ["0"])[0]
        if not offset.isdecimal() or len(offset) > 18:
            self._answer(HTTPStatus.BAD_REQUEST, "text/plain", b"offset is a number of bytes\n")
            return
        news = run_news(self.server.folder, known, int(offset))
        self._answer(HTTPStatus.OK, "application/json", json.dumps(news).encode())

    def _from_here(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1:
            return False
        name, colon, port = hosts[0].strip().lower().rpartition(":")
        # The port is not checked, because ssh may forward a different one.
        return (name if colon and port.isdecimal() else hosts[0].strip().lower()) in _NAMES

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in {**_HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        # Closing the connection discards the unread body of a refused request, and no thread waits for another request.
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the command prints only the page's URL."""
