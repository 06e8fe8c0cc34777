"""The report over HTTP, for this machine only; it is rendered again whenever a file of a run has
changed.
"""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic

from retrain.errors import EnvironmentFailure, RetrainError
from retrain.records.redact import Redactor
from retrain.records.run_folder import RunFolder
from retrain.report.data import ReportRequest
from retrain.report.page import LiveReload, build_page

HOST = "127.0.0.1"
_SKIPPED = frozenset({"checkpoints", "wandb", "tensorboard"})
"""Folders of a run that a report does not read, or only after the run has ended."""
_READ = frozenset({".jsonl", ".json", ".toml", ".safetensors", RunFolder(Path()).lock_owner.suffix})


class ReportServer(ThreadingHTTPServer):
    """Serves a report at 127.0.0.1; port 0 takes a free port. Raises EnvironmentFailure if the port
    is in use or not allowed.
    """

    daemon_threads = True
    request_queue_size = 512
    """Connections that wait to be taken; beyond socketserver's five, one tries again after a
    second."""
    rest = 9.0
    """After rendering for t seconds the server waits `rest` * t before the next rendering, so that
    the runs keep the machine."""

    def __init__(self, request: ReportRequest, port: int, refresh_s: float) -> None:
        self.request = request
        self.refresh_s = refresh_s
        self._lock = threading.Lock()  # matplotlib's settings are global
        self._version, self._page, self._rested_at = "", "", 0.0
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise EnvironmentFailure(
                f"--port {port} cannot be used on {HOST}: {reason}; name another, or 0 for a free"
                " one."
            ) from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/"

    @property
    def own_names(self) -> frozenset[str]:
        """The Host headers of this machine's browsers; a page of another site cannot send them (DNS
        rebinding).
        """
        return frozenset(f"{name}:{self.port}" for name in (HOST, "localhost"))

    def page(self) -> str:
        with self._lock:
            version = self._current()
            if version != self._version:
                started = monotonic()
                self._page = build_page(self.request, LiveReload(version, self.refresh_s))
                self._version = version
                self._rested_at = monotonic() + self.rest * (monotonic() - started)
            return self._page

    def version(self) -> str:
        """The version of the page that would be sent now."""
        with self._lock:
            return self._current()

    def _current(self) -> str:
        resting = self._version and monotonic() < self._rested_at
        if resting:
            return self._version
        return version_of(self.request.folder)


def version_of(folder: Path) -> str:
    """Return a digest that changes whenever a file that the report reads does."""
    digest = hashlib.sha256()
    for path in _files(folder):
        try:
            status = path.stat()
        except FileNotFoundError:  # replaced or removed meanwhile
            continue
        digest.update(
            f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED and not name.startswith(".")
        )
        for name in sorted(names):
            hidden = name.startswith(".") and name != RunFolder(folder).lock_owner.name
            if not hidden and Path(name).suffix in _READ:
                yield Path(place, name)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version, sys_version = "retrain", ""

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.own_names:
            self._answer(HTTPStatus.FORBIDDEN, "This server answers its own machine only.\n")
        elif self.path == "/":
            try:
                self._answer(HTTPStatus.OK, self.server.page(), "text/html")
            except RetrainError as error:
                self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, Redactor().text(f"{error}\n"))
        elif self.path == "/version":
            self._answer(HTTPStatus.OK, self.server.version())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "There is only one page: /\n")

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Frame-Options": "DENY",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        with suppress(ConnectionError):  # a reader who closed the page
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a live page sends a request every few seconds."""
