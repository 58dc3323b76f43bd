"""SeaweedFS, another server of S3's protocol, which keeps objects on the disk: a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.worlds import free_port

PROGRAM = Path(sys.executable).with_name("weed")


@contextmanager
def running_seaweed(directory: Path) -> Iterator[str]:
    """A server that nobody but this machine reaches, until the block ends; gives its address.

    Args:
        directory: Where it keeps everything.
    """
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    command = [str(PROGRAM), "server", "-s3", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    for name, port in ports.items():
        option = name + ".port"
        command += [f"-{option}={port}"]
        if name != "s3":
            command += [f"-{option}.grpc={free_port()}"]
    command += [f"-s3.port.grpc={free_port()}", "-master.volumeSizeLimitMB=512", "-volume.max=20"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
        try:
            url = f"http://127.0.0.1:{ports['s3']}"
            _wait_for(url, process)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=30)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:  # it answers, and knows no such bucket
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"SeaweedFS does not answer at {url}.")
