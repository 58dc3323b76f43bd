"""SeaweedFS, another server of S3's protocol, which keeps objects on the disk: a process of its own."""

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.stores.servers import BUCKET, environment
from tests.worlds import free_port

PROGRAM = Path(sys.executable).with_name("weed")


class SeaweedServer:
    """A server with an empty bucket, that nobody but this machine reaches. What it holds survives `stop`."""

    url = f"s3://{BUCKET}"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        self._command = [str(PROGRAM), "server", "-s3", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        for name, port in ports.items():
            option = name + ".port"
            self._command += [f"-{option}={port}"]
            if name != "s3":
                self._command += [f"-{option}.grpc={free_port()}"]
        self._command += [f"-s3.port.grpc={free_port()}", "-master.volumeSizeLimitMB=512", "-volume.max=20"]
        self.address = f"http://127.0.0.1:{ports['s3']}"
        self.environment = environment(self.address)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        make_bucket = urllib.request.Request(f"{self.address}/{BUCKET}", method="PUT")
        urllib.request.urlopen(make_bucket, timeout=30).close()

    def start(self) -> None:
        """Answers, if it did not."""
        if self._process is not None:
            return
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self._directory)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(self.address, timeout=2).close()
                return
            except urllib.error.HTTPError:  # it answers, and knows no such bucket
                return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"SeaweedFS does not answer at {self.address}.")

    def stop(self) -> None:
        """Nobody answers any more."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)
            self._process = None


@contextmanager
def working_store() -> Iterator[tuple[Path, str]]:
    """A directory to work in, and the address of a server with an empty bucket, which this process then speaks to."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "weed").mkdir()
        server = SeaweedServer(Path(directory) / "weed")
        try:
            os.environ.update(server.environment)
            yield Path(directory), server.address
        finally:
            server.stop()
