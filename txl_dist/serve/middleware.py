"""ASGI middleware between clients and routes: it checks the key, and limits the number, size and time of requests.

- The whole body of a request is read here, up to a limit, before a route runs. After that a route receives only the
  client's disconnection.
- Every error is a JSON object in OpenAI's form.
- Many clients send a whole request before they read. If the server closes a connection while bytes arrive, the
  connection is reset and the client loses the response. So after an early response the rest of the request is read and
  discarded, up to DRAIN_BYTES bytes or for DRAIN_S seconds. Then the connection is closed.
"""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from txl_dist.console.logging import logger
from txl_dist.serve.api_errors import APIError
from txl_dist.serve.service import Service

OPEN_PATHS = {"/", "/page.css", "/page.js", "/health"}
"""Paths that need no key, and that are served even while the server drains."""
BODY_S = 30.0
"""Maximum number of seconds in which the body of a request must arrive."""
DRAIN_BYTES = 2**26
"""Maximum number of bytes of a request that are read and discarded after an early response."""
DRAIN_S = 10.0
"""Maximum number of seconds for which a request is read and discarded after an early response."""
SEND_S = 60.0
"""Maximum number of seconds for which a client can leave a full buffer unread. After this time the client is
disconnected."""
HEADER_BYTES = 2**14
"""Maximum number of bytes of a memory file in addition to its tensors."""
MOST_UPLOADS = 4
"""Maximum number of memory files that arrive at once, because each file is in host memory as a whole."""
SPARE_REQUESTS = 64
"""Number of requests that are accepted at once in addition to the running texts and the places in the queue."""


class Gate:
    """Wrapper of the server's application, which checks each request before a route gets it.

    `key` is the key that clients must send. If `key` is empty, clients need no key. A JSON body can have as many bytes
    as `--max-body-bytes` allows. A memory file can have at most HEADER_BYTES bytes more than the tensors of a full
    memory.
    """

    def __init__(self, app: ASGIApp, service: Service, *, key: str) -> None:
        self._app = app
        self._service = service
        self._key = key.encode()
        serving = service.serving
        self._max_body = serving.max_body_bytes
        self._max_upload = service.largest_memory + HEADER_BYTES
        self._max_requests = serving.max_num_seqs + serving.max_queue + SPARE_REQUESTS
        self.num_active = 0
        """Number of requests that are being processed. Requests for open paths are not counted."""
        self._num_uploads = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to an HTTP request. Other kinds of connections are ignored."""
        if scope["type"] != "http":
            return
        incoming = _RequestBody(scope, receive)
        response = _Response(send, incoming)
        is_open = scope["path"] in OPEN_PATHS
        is_upload = _is_upload(scope)
        self.num_active += not is_open
        self._num_uploads += is_upload
        try:
            body = b""  # not read for an open path, to which anybody may send one
            if not is_open:
                self._admit(scope)
                if is_upload:
                    limit = self._max_upload
                else:
                    limit = self._max_body
                body = await self._read_body(scope, incoming, limit=limit)
            await self._app(scope, _replay(body, receive), response.send)
        except APIError as refusal:
            await self._refuse(refusal, scope, receive, response)
        except TimeoutError:  # the client does not read
            logger.warning("a client did not read its response, and was disconnected")
        except _ClientGoneError:
            pass
        except Exception:  # noqa: BLE001  a defect: the server continues
            logger.exception("%s %s failed", scope["method"], scope["path"])
            defect = APIError(500, "the server failed. The server's log contains the reason.", code="defect")
            await self._refuse(defect, scope, receive, response)
        finally:
            self.num_active -= not is_open
            self._num_uploads -= is_upload
            self._service.metrics.requests.labels(response.status or 499).inc()

    def _admit(self, scope: Scope) -> None:
        """Raise APIError if a request lacks the key, if the server drains, or if there are too many requests."""
        if self._key:
            scheme, _, key = _header(scope, b"authorization").partition(b" ")
            is_right_key = hmac.compare_digest(key.strip(), self._key)
            if not is_right_key or scheme.lower() != b"bearer":
                message = "this server requires an API key. Send the header `Authorization: Bearer KEY`."
                raise APIError(401, message, code="invalid_api_key")
        if self._service.is_draining and scope["path"].startswith("/v1/"):
            raise APIError(503, "the server is stopping. Try another server, or try again later.", code="draining")
        if self.num_active > self._max_requests or self._num_uploads > MOST_UPLOADS:
            raise APIError(429, "the server has too many requests. Try again later.", code="too_many_requests")

    async def _read_body(self, scope: Scope, incoming: _RequestBody, *, limit: int) -> bytes:
        """Read a body. Raises APIError if the body has more than `limit` bytes, or takes more than BODY_S seconds."""
        too_long = APIError(413, f"the body has more than {limit:,} bytes. Send a shorter body.", code="body_too_large")
        if int(_header(scope, b"content-length") or b"0") > limit:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while not incoming.has_ended:
                    body += await incoming.take()
                    if len(body) > limit:
                        raise too_long
            return bytes(body)
        except TimeoutError:
            raise APIError(
                408,
                "the body did not arrive in time. Send a shorter body, or use a faster connection.",
                code="slow_body",
            ) from None

    async def _refuse(self, refusal: APIError, scope: Scope, receive: Receive, response: _Response) -> None:
        """Send an error response, unless a part of the response has already been sent."""
        if response.status is None:
            await refusal.response()(scope, receive, response.send)


def _header(scope: Scope, name: bytes) -> bytes:
    """Return the value of the first header with this name, or b"" if the request has no such header."""
    for key, value in scope["headers"]:
        if key == name:
            content: bytes = value
            return content
    return b""


def _is_upload(scope: Scope) -> bool:
    is_file = _header(scope, b"content-type").startswith(b"application/octet-stream")
    return is_file and bool(scope["path"] == "/v1/memories")


class _ClientGoneError(Exception):
    """Disconnection of the client before the body of its request had arrived."""


class _RequestBody:
    """Body of a request that is read in parts as it arrives."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        has_length = _header(scope, b"content-length") not in (b"", b"0")
        self.has_ended = not (has_length or _header(scope, b"transfer-encoding"))

    async def take(self) -> bytes:
        """Return the next bytes of the body. Raises _ClientGoneError if the client has disconnected."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise _ClientGoneError
        self.has_ended = not message.get("more_body")
        content: bytes = message.get("body", b"")
        return content

    async def discard(self) -> None:
        """Read and discard the rest of the body: at most DRAIN_BYTES bytes, for at most DRAIN_S seconds, or until the
        client disconnects."""
        num_bytes = 0
        with suppress(TimeoutError, _ClientGoneError):
            async with asyncio.timeout(DRAIN_S):
                while not self.has_ended and num_bytes <= DRAIN_BYTES:
                    num_bytes += len(await self.take())


class _Response:
    """Response to a request while it is sent. `status` is None until the response begins."""

    def __init__(self, send: Send, incoming: _RequestBody) -> None:
        self._send = send
        self._incoming = incoming
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        """Send a message of the response. Raises TimeoutError if the client does not read the message.

        The last message waits until the rest of the request's body has been read and discarded.
        """
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message.setdefault("headers", [])
            headers.append((b"x-content-type-options", b"nosniff"))
            if not self._incoming.has_ended:
                headers.append((b"connection", b"close"))
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if is_last and not self._incoming.has_ended:
            # The whole response is sent first, so that a client which reads early need not wait.
            await self._send_in_time({**message, "more_body": True})
            await self._incoming.discard()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send_in_time(message)

    async def _send_in_time(self, message: Message) -> None:
        async with asyncio.timeout(SEND_S):
            await self._send(message)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` function. It returns `body`, which was read before, and then the messages after the body."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        if messages:
            return messages.pop()
        return await receive()

    return receive_again
