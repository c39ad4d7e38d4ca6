"""Between clients and routes: who may come in, how much they may bring and how long they may take. Plain ASGI.

A body is read here, whole and within its bounds, before a route sees it; so what a route receives then is only that its
client has gone away. Whatever goes wrong is told as JSON, in OpenAI's form.

Many clients send a whole request before they read. A connection that is closed while bytes arrive is reset, and a reset
discards the answer. So the rest of a request that is answered early is read and discarded, up to DRAIN_BYTES, DRAIN_S.
Then the connection is closed, whatever else the client would send.
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
"""Without a key, and while the server drains."""
BODY_S = 30.0
"""Seconds for a body to arrive."""
DRAIN_BYTES = 2**26
"""Bytes of a body that are read and discarded after an early answer."""
DRAIN_S = 10.0
"""Seconds for these bytes to arrive."""
SEND_S = 60.0
"""Seconds that a client may leave a full buffer unread."""
HEADER_BYTES = 2**14
"""Of a memory's file, more than its tensors."""
MOST_UPLOADS = 4
"""Files of memories that come in at a time: each is held whole."""
SPARE_REQUESTS = 64
"""So many more than there are rows and places in the queue are listened to at a time."""


class Gate:
    """Wraps an application. A memory's file may be as large as the model makes them, every other body `max_body`."""

    def __init__(self, app: ASGIApp, service: Service, *, key: str) -> None:
        self._app, self._service, self._key = app, service, key.encode()
        serving = service.serving
        self._max_body, self._max_upload = serving.max_body, service.largest_memory + HEADER_BYTES
        self._max_requests = serving.rows + serving.queue + SPARE_REQUESTS
        self.num_active = 0
        """Requests that are being answered, but for health."""
        self._num_uploads = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        arriving = _Arriving(scope, receive)
        answer = _Answer(send, arriving)
        is_open, is_upload = scope["path"] in OPEN_PATHS, _is_upload(scope)
        self.num_active += not is_open
        self._num_uploads += is_upload
        try:
            body = b""  # of an open path it is not read: anybody may send one
            if not is_open:
                self._admit(scope)
                body = await self._body(scope, arriving, most=self._max_upload if is_upload else self._max_body)
            await self._app(scope, _replay(body, receive), answer.send)
        except APIError as refusal:
            await self._refuse(refusal, scope, receive, answer)
        except TimeoutError:  # of a client that does not read
            logger.warning("a client left its answer unread, and was cut off")
        except _ClientGoneError:
            pass
        except Exception:  # noqa: BLE001  a defect: the server goes on
            logger.exception("%s %s failed", scope["method"], scope["path"])
            defect = APIError(500, "the server failed; its log says why.", code="defect")
            await self._refuse(defect, scope, receive, answer)
        finally:
            self.num_active -= not is_open
            self._num_uploads -= is_upload
            self._service.metrics.requests.labels(answer.status or 499).inc()

    def _admit(self, scope: Scope) -> None:
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        if self._key and not (hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"):
            message = "this server asks for its key. Send the header `Authorization: Bearer KEY`."
            raise APIError(401, message, code="invalid_api_key")
        if self._service.is_draining and scope["path"].startswith("/v1/"):
            raise APIError(503, "the server is stopping. Ask another one, or again later.", code="draining")
        if self.num_active > self._max_requests or self._num_uploads > MOST_UPLOADS:
            raise APIError(429, "the server has too many requests. Come again later.", code="too_many_requests")

    async def _body(self, scope: Scope, arriving: _Arriving, *, most: int) -> bytes:
        too_long = APIError(413, f"the body has more than {most:,} bytes. Send less.", code="body_too_large")
        if int(_header(scope, b"content-length") or b"0") > most:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while not arriving.has_ended:
                    body += await arriving.take()
                    if len(body) > most:
                        raise too_long
            return bytes(body)
        except TimeoutError:
            raise APIError(408, "the body did not arrive in time. Send it again, faster.", code="slow_body") from None

    async def _refuse(self, refusal: APIError, scope: Scope, receive: Receive, answer: _Answer) -> None:
        if answer.status is None:
            await refusal.response()(scope, receive, answer.send)


def _header(scope: Scope, name: bytes) -> bytes:
    """The first of this name, which is the one that routes see; empty without any."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def _is_upload(scope: Scope) -> bool:
    is_file = _header(scope, b"content-type").startswith(b"application/octet-stream")
    return is_file and bool(scope["path"] == "/v1/memories")


class _ClientGoneError(Exception):
    """Before its body was there."""


class _Arriving:
    """The body of a request, while it arrives."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        has_length = _header(scope, b"content-length") not in (b"", b"0")
        self.has_ended = not (has_length or _header(scope, b"transfer-encoding"))

    async def take(self) -> bytes:
        """The next bytes. Raises _ClientGoneError."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise _ClientGoneError
        self.has_ended = not message.get("more_body")
        content: bytes = message.get("body", b"")
        return content

    async def discard(self) -> None:
        """Read what is left, within the bounds, as long as the client is there."""
        num_bytes = 0
        with suppress(TimeoutError, _ClientGoneError):
            async with asyncio.timeout(DRAIN_S):
                while not self.has_ended and num_bytes <= DRAIN_BYTES:
                    num_bytes += len(await self.take())


class _Answer:
    """What was answered, while it is."""

    def __init__(self, send: Send, arriving: _Arriving) -> None:
        self._send, self._arriving = send, arriving
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        """Send it. Before the end, discard what still arrives. Raises TimeoutError if the client does not read."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message.setdefault("headers", [])
            headers.append((b"x-content-type-options", b"nosniff"))
            if not self._arriving.has_ended:
                headers.append((b"connection", b"close"))
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if is_last and not self._arriving.has_ended:
            # All of the answer goes out first: a client that reads early need not wait.
            await self._send_in_time({**message, "more_body": True})
            await self._arriving.discard()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send_in_time(message)

    async def _send_in_time(self, message: Message) -> None:
        async with asyncio.timeout(SEND_S):
            await self._send(message)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A body that was read, and then what else comes."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
