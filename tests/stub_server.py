"""A small server on loopback for tests of services: it answers what a function says and remembers its requests."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

# From the number of the request (0 = first) and its JSON to a status and an answer: JSON, or bytes as they are.
Answer = Callable[[int, Any], tuple[int, Any]]


@dataclass
class Stub:
    """A running server."""

    url: str
    requests: list[Any] = field(default_factory=list)  # the JSON of each request, in order
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@contextmanager
def serve(answer: Answer) -> Iterator[Stub]:
    """Run a server until the block ends."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(stub.requests)
                stub.requests.append(content)
                stub.headers.append(dict(self.headers))
                stub.paths.append(self.path)
            status, body = answer(number, content)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client no longer waits

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub = Stub(f"http://127.0.0.1:{server.server_port}/score")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with patch.dict(os.environ, {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}):
            yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def by_length(number: int, content: Any) -> tuple[int, Any]:
    """Score each row by the length of its response."""
    return 200, {"scores": [float(len(row["response"])) for row in content["rows"]]}
