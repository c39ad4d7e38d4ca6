"""A server in this process with a tiny random model, and plain HTTP requests to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.helpers.language import TEXT
from txl_dist.inference.language_model import LanguageModel
from txl_dist.serve.listening import listen
from txl_dist.serve.options import Serving
from txl_dist.serve.server import Server
from txl_dist.serve.service import Service


@dataclass
class Reply:
    """Answer of the server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """Message of an error, which must have OpenAI's form."""
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return str(error["message"])

    @property
    def events(self) -> list[Any]:
        """Events of a complete stream."""
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


class Served:
    """A running server, and requests to it."""

    def __init__(self, server: Server) -> None:
        self.server, self.url = server, server.url
        self.service: Service = server.service
        self.address = urlsplit(server.url)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(str(self.address.hostname), self.address.port, timeout=60)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """Send one request and return the answer. A body that is not bytes is sent as JSON."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, bytes):
            body, given = json.dumps(body).encode(), {"content-type": "application/json", **given}
        connection = self.connect()
        connection.request(method, path, body, given)
        response = connection.getresponse()
        reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        connection.close()
        return reply

    def complete(self, prompt: Any = TEXT, **fields: Any) -> Reply:
        return self.ask("POST", "/v1/completions", {"prompt": prompt, **fields})

    def wait_until_idle(self) -> None:
        """Wait until no text is generated or queued."""
        worker = self.service.worker
        wait_until(lambda: not worker._jobs and not worker._waiting and not worker.num_rows)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until `holds` returns True. Raises AssertionError after 30 seconds."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def served(model: LanguageModel, **settings: Any) -> Iterator[Served]:
    """Yield a server of a model on a free port."""
    serving = Serving(port=0, **settings)
    server = Server(model, serving, listen(serving), name="tiny")
    thread = threading.Thread(target=lambda: asyncio.run(server.run(heeds_signals=False)), daemon=True)
    thread.start()
    wait_until(lambda: server.has_started)
    try:
        yield Served(server)
    finally:
        server.stop()
        thread.join(timeout=60)
        assert not thread.is_alive()
