"""A server that speaks as much of W&B's protocol as one run needs, and keeps the history that it is sent."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Rows = list[dict[str, Any]]


@contextmanager
def wandb_server() -> Iterator[tuple[str, dict[str, Rows]]]:
    """Serves on this machine inside; gives the address, and each run's rows by its id."""
    histories: dict[str, Rows] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                data = gzip.decompress(data)
            answer: dict[str, Any] = {}
            if self.path.endswith("/graphql"):
                request = json.loads(data)
                answer = {"data": _answer(request.get("operationName"), request["variables"], histories, address)}
            elif self.path.endswith("/file_stream"):
                rows = histories.setdefault(self.path.split("/")[-2], [])
                chunk = json.loads(data).get("files", {}).get("wandb-history.jsonl")
                if chunk is not None:
                    rows[chunk["offset"] :] = map(json.loads, chunk["content"])
            self._reply(answer)

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._reply({})

        def _reply(self, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        address = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield address, histories
        server.shutdown()
        thread.join()


def _answer(
    operation: str | None, variables: dict[str, Any], histories: dict[str, Rows], address: str
) -> dict[str, Any]:
    entity = {"id": "entity", "name": "somebody"}
    project = {"id": "project", "name": "p", "entity": entity}
    match operation:
        case "Viewer":
            teams: dict[str, Any] = {"edges": []}
            return {"viewer": {"id": "1", "entity": "somebody", "username": "somebody", "flags": "{}", "teams": teams}}
        case "RunResumeStatus":
            rows = histories.get(variables["name"])
            return {"model": project | {"bucket": None if rows is None else _known(variables["name"], rows)}}
        case "UpsertBucket":
            name = variables["name"]
            is_new = name not in histories
            rows = histories.setdefault(name, [])
            run = {"id": name, "name": name, "displayName": name, "historyLineCount": len(rows), "project": project}
            return {"upsertBucket": {"bucket": run, "inserted": is_new}}
        case "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{address}/upload"} for file in variables["files"]]
            return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
        case _:
            return {}


def _known(name: str, rows: Rows) -> dict[str, Any]:
    """What the server tells of a run that goes on."""
    return {
        "id": name,
        "name": name,
        "displayName": name,
        "summaryMetrics": json.dumps(rows[-1] if rows else {}),
        "historyLineCount": len(rows),
        "historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]),
        "eventsLineCount": 0,
        "eventsTail": "[]",
        "logLineCount": 0,
        "config": "{}",
        "tags": [],
        "wandbConfig": json.dumps({"t": 1}),
    }
