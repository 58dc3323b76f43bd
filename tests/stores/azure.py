"""A server of Azure's blob protocol, as far as adlfs speaks it: blobs in memory, in a thread of this process.

It follows what Azure says of each operation, and is no one else's: what it proves is what adlfs is asked
for, and what becomes of its answers. It asks for no credentials.
"""

import hashlib
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

from tests.stores.servers import BUCKET, ServedHere

MISSING = [name for name in ("adlfs",) if find_spec(name) is None]
ACCOUNT, KEY = "account", "bm90LXRvLWJlLXNlZW4="
_DATE = "Mon, 23 Nov 2026 00:00:00 GMT"
_XML = '<?xml version="1.0" encoding="utf-8"?>'


@dataclass
class Blob:
    content: bytes
    metadata: dict[str, str]

    @property
    def headers(self) -> dict[str, str]:
        described = {f"x-ms-meta-{name}": value for name, value in self.metadata.items()}
        return described | {
            "ETag": f'"{hashlib.sha256(self.content).hexdigest()[:16]}"',
            "Last-Modified": _DATE,
            "x-ms-blob-type": "BlockBlob",
            "Content-Type": "application/octet-stream",
            "Accept-Ranges": "bytes",
        }


@dataclass
class Request:
    method: str
    blob: str
    """Its name; empty where the container is meant."""
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = field(repr=False)


@dataclass
class Answer:
    status: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class AzureServer(ServedHere):
    """A server with an empty container, which answers."""

    url = f"az://{BUCKET}"

    def __init__(self) -> None:
        super().__init__()
        self.ignores_conditions = False
        self._blobs: dict[str, Blob] = {}
        self._blocks: dict[tuple[str, str], bytes] = {}
        self._lock = threading.Lock()
        address = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        self.environment = {
            "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={address};"
        }
        self.start()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if self._server is None:  # a connection that was kept open over `stop`
            answer = _error("503 Service Unavailable", "ServerBusy")
        else:
            request = _read(environ)
            with self._lock:
                answer = self._answer(request)
        headers = {"x-ms-version": "2021-12-02", "x-ms-request-id": "1", "Date": _DATE} | answer.headers
        headers.setdefault("Content-Length", str(len(answer.body)))
        start_response(answer.status, list(headers.items()))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [answer.body]

    def _answer(self, request: Request) -> Answer:
        if not request.blob:
            return self._list(request.query) if request.query.get("comp") == "list" else self._of_container(request)
        if request.method == "PUT":
            return self._put(request)
        blob = self._blobs.get(request.blob)
        if blob is None:
            return _error("404 Not Found", "BlobNotFound")
        if request.method == "DELETE":
            del self._blobs[request.blob]
            return Answer("202 Accepted")
        if request.method == "HEAD":
            return Answer("200 OK", blob.headers | {"Content-Length": str(len(blob.content))})
        return _part(blob, request.headers.get("x-ms-range") or request.headers.get("range", ""))

    def _of_container(self, request: Request) -> Answer:
        return Answer("201 Created" if request.method == "PUT" else "200 OK", {"ETag": '"1"', "Last-Modified": _DATE})

    def _put(self, request: Request) -> Answer:
        what, name = request.query.get("comp"), request.blob
        if what == "block":
            self._blocks[name, request.query["blockid"]] = request.body
            return Answer("201 Created")
        is_conditional = request.headers.get("if-none-match") == "*" and not self.ignores_conditions
        if is_conditional and name in self._blobs:
            return _error("409 Conflict", "BlobAlreadyExists")
        metadata = {key[10:]: value for key, value in request.headers.items() if key.startswith("x-ms-meta-")}
        source = request.headers.get("x-ms-copy-source")
        if source is not None:
            path = unquote(source.partition("?")[0]).partition(f"/{ACCOUNT}/{BUCKET}/")[2]
            copied = self._blobs[path]
            self._blobs[name] = Blob(copied.content, copied.metadata)
            done = {"x-ms-copy-id": "1", "x-ms-copy-status": "success"}
            return Answer("202 Accepted", self._blobs[name].headers | done)
        content = request.body
        if what == "blocklist":
            listed = re.findall(r"<Latest>(.*?)</Latest>", request.body.decode())
            content = b"".join(self._blocks.pop((name, block)) for block in listed)
        self._blobs[name] = Blob(content, metadata)
        return Answer("201 Created", self._blobs[name].headers)

    def _list(self, query: dict[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        lines = dict.fromkeys(
            self._line(name, prefix, delimiter) for name in sorted(self._blobs) if name.startswith(prefix)
        )
        body = f'{_XML}<EnumerationResults ContainerName="{BUCKET}"><Prefix>{escape(prefix)}</Prefix><Blobs>'
        body += f"{''.join(lines)}</Blobs><NextMarker/></EnumerationResults>"
        return Answer("200 OK", {"Content-Type": "application/xml"}, body.encode())

    def _line(self, name: str, prefix: str, delimiter: str) -> str:
        cut = name.find(delimiter, len(prefix)) if delimiter else -1
        if cut >= 0:
            return f"<BlobPrefix><Name>{escape(name[: cut + 1])}</Name></BlobPrefix>"
        blob = self._blobs[name]
        metadata = "".join(f"<{key}>{escape(value)}</{key}>" for key, value in blob.metadata.items())
        return (
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{_DATE}</Last-Modified>"
            f"<Etag>{blob.headers['ETag']}</Etag><Content-Length>{len(blob.content)}</Content-Length>"
            f"<BlobType>BlockBlob</BlobType></Properties><Metadata>{metadata}</Metadata></Blob>"
        )


def _read(environ: dict[str, Any]) -> Request:
    path = environ["PATH_INFO"].encode("latin-1").decode().removeprefix(f"/{ACCOUNT}/{BUCKET}").strip("/")
    query = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"], keep_blank_values=True).items()}
    headers = {name[5:].replace("_", "-").lower(): value for name, value in environ.items() if name.startswith("HTTP_")}
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    return Request(environ["REQUEST_METHOD"], path, query, headers, body)


def _part(blob: Blob, asked: str) -> Answer:
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
    if match is None:
        return Answer("200 OK", blob.headers, blob.content)
    size, first = len(blob.content), int(match[1])
    last = min(int(match[2] or size - 1), size - 1)
    if first >= size:
        return _error("416 Range Not Satisfiable", "InvalidRange", {"Content-Range": f"bytes */{size}"})
    headers = blob.headers | {"Content-Range": f"bytes {first}-{last}/{size}"}
    return Answer("206 Partial Content", headers, blob.content[first : last + 1])


def _error(status: str, code: str, headers: dict[str, str] | None = None) -> Answer:
    body = f"{_XML}<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return Answer(status, {"x-ms-error-code": code, "Content-Type": "application/xml"} | (headers or {}), body)
