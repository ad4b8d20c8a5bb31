"""The page's server: what it serves, and to whom."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from meshcomm.config import Config, load_config
from meshcomm.errors import ViewError
from meshcomm.view.page import document
from meshcomm.view.server import Server
from tests.view.test_facts import MESH, facts_of
from tests.view.test_run import settings_for


@contextlib.contextmanager
def served(settings: Config, world: int | None = None, folder: Path | None = None) -> Iterator[Server]:
    with Server(facts_of(settings, world), folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: Server, path: str, method: str = "GET", headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=100)
    connection.putrequest(method, path, skip_host=headers is not None)
    for name, value in (headers or {}).items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def test_what_is_served_and_what_is_not(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "run")
    with served(settings, folder=tmp_path / "run") as server:
        assert (
            server.server_address[0] == "127.0.0.1"
            and server.url == f"http://127.0.0.1:{server.server_port}/"
        )
        status, headers, page = ask(server, "/")
        assert (status, page.decode()) == (200, document().html)
        assert headers["content-security-policy"] == document().policy
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
        assert "access-control-allow-origin" not in headers and "python" not in headers["server"].lower()
        assert json.loads(ask(server, "/facts.json")[2]) == facts_of(settings)
        assert json.loads(ask(server, "/run.json?id=&offset=0")[2])["state"] == "waiting"
        head = ask(server, "/", "HEAD")
        assert (head[0], head[1]["content-length"], head[2]) == (200, str(len(page)), b"")
        for path in ("/page.js", "/../pyproject.toml", "//etc/passwd", "/%2e%2e/x", "/favicon.ico"):
            assert ask(server, path)[0] == 404, path
        with socket.create_connection(server.server_address[:2], timeout=60) as raw:
            raw.sendall(b"GET http://[::1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert raw.recv(64).startswith(b"HTTP/1.1 400 ")
        for offset in ("-1", "x", "9" * 30, "1e3"):
            assert ask(server, f"/run.json?offset={offset}")[0] == 400, offset
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            status, headers, _ = ask(server, "/", method)
            assert (status, headers["allow"], headers["connection"]) == (405, "GET, HEAD", "close"), method
        assert ask(server, "/", "BREW")[0] == 501


def test_only_names_of_this_machine_are_answered() -> None:
    mine = ("127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]:80")
    foreign = ("mesh.example", "127.0.0.1.mesh.example:80", "mesh.example:127.0.0.1", "localhost.", "", None)
    with served(load_config(MESH)) as server:
        for host in (*mine, *foreign):
            for path in ("/", "/facts.json", "/run.json"):
                status, _, body = ask(server, path, headers={} if host is None else {"Host": host})
                assert status == (200 if host in mine else 421), (host, path)
                assert host in mine or b"dims" not in body


def test_nothing_listens_on_other_addresses() -> None:
    with served(load_config(MESH)) as server, socket.socket() as other:
        # Another address of the loopback interface is refused if only 127.0.0.1 is bound.
        other.settimeout(10)
        with pytest.raises(OSError):
            other.connect(("127.0.0.2", server.server_port))


def test_a_port_that_is_taken_is_said() -> None:
    said = r"address already in use\n  given:    --port \d+ on 127.0.0.1\n(.*\n)+  try:      leave out --port"
    with served(load_config(MESH)) as server, pytest.raises(ViewError, match=said):
        Server({}, None, server.server_port)
