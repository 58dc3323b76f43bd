"""What servers of object stores have in common, and moto, which can be stopped, throttled and made forgetful."""

import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from tests.worlds import free_port

SECRET = "not-to-be-seen-0123456789"
BUCKET = "bucket"


class QuietHandler(WSGIRequestHandler):
    """Writes no line for each request."""

    def log(self, *args: Any) -> None:
        pass


class ServedHere:
    """A WSGI application in a thread of this process, which can be stopped. What it holds survives `stop`."""

    def __init__(self) -> None:
        self.port = free_port()
        self._server: BaseWSGIServer | None = None

    def start(self) -> None:
        """Answers, if it did not."""
        if self._server is None:
            self._server = make_server("127.0.0.1", self.port, self, threaded=True, request_handler=QuietHandler)
            self._server.daemon_threads = True  # type: ignore[attr-defined]
            threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Nobody answers any more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class ServerProcess:
    """A server that is a process of its own, works in `directory`, and answers at `address`.

    Nobody but this machine reaches it. What it holds survives `stop`.
    """

    def __init__(self, command: list[str], directory: Path, address: str) -> None:
        self._command, self._directory, self.address = command, directory, address
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Answers, if it did not."""
        if self._process is not None:
            return
        nowhere = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdout=nowhere, stderr=nowhere, cwd=self._directory)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(self.address, timeout=2).close()
                return
            except urllib.error.HTTPError:  # it answers, and knows no such place
                return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"{self._command[0]} does not answer at {self.address}.")

    def stop(self) -> None:
        """Nobody answers any more."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)
            self._process = None


class Server(ServedHere):
    """An S3 server: moto."""

    def __init__(self) -> None:
        super().__init__()
        self._app = DomainDispatcherApplication(create_backend_app)
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[tuple[str, str, str]] = []
        self.throttled = 0
        self.refuses = False
        self.ignores_conditions = False
        self.before: Callable[[str, str], None] = lambda method, path: None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path, environ.get("HTTP_RANGE", "")))
        self.before(method, path)
        if self._server is None:  # a connection that was kept open over `stop`
            return _answer(environ, start_response, "503 Service Unavailable", "ServiceUnavailable", "stopped")
        if self.refuses:
            text = f"The key {SECRET} is not known; see http://x/?X-Amz-Signature={SECRET}"
            return _answer(environ, start_response, "403 Forbidden", "InvalidAccessKeyId", text)
        if self.throttled > 0:
            self.throttled -= 1
            return _answer(environ, start_response, "503 Slow Down", "SlowDown", "Please reduce your request rate.")
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        return self._app(environ, start_response)


def _answer(environ: dict[str, Any], start_response: Any, status: str, code: str, message: str) -> list[bytes]:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]  # HTTP allows none there, so a reason is never seen


def environment(url: str) -> dict[str, str]:
    """The variables with which a client finds the server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
