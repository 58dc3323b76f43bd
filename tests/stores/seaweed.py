"""SeaweedFS, another server of S3's protocol, which keeps objects on the disk: a process of its own."""

import os
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.stores.servers import BUCKET, ServerProcess, environment
from tests.worlds import free_port

PROGRAM = Path(sys.executable).with_name("weed")


class SeaweedServer(ServerProcess):
    """A server with an empty bucket."""

    url = f"s3://{BUCKET}"

    def __init__(self, directory: Path) -> None:
        ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        command = [str(PROGRAM), "server", "-s3", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        for name, port in ports.items():
            option = name + ".port"
            command += [f"-{option}={port}"]
            if name != "s3":
                command += [f"-{option}.grpc={free_port()}"]
        command += [f"-s3.port.grpc={free_port()}", "-master.volumeSizeLimitMB=512", "-volume.max=20"]
        super().__init__(command, directory, f"http://127.0.0.1:{ports['s3']}")
        self.environment = environment(self.address)
        make_bucket = urllib.request.Request(f"{self.address}/{BUCKET}", method="PUT")
        urllib.request.urlopen(make_bucket, timeout=30).close()


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
