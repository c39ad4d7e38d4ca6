"""A server from its start to its end. On SIGTERM or SIGINT it drains: new requests are refused, those in work get their
time, and then it is gone, with exit code 0."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from txl_dist.console.formatting import counted
from txl_dist.console.logging import logger
from txl_dist.errors import TxlError
from txl_dist.inference.language_model import LanguageModel
from txl_dist.serve.app import create_app
from txl_dist.serve.listening import url_of
from txl_dist.serve.middleware import Gate
from txl_dist.serve.options import Serving
from txl_dist.serve.service import Service

LAST_WORDS_S = 5.0
"""Seconds for what was made to reach its clients, once all texts have ended."""


class Server:
    """A model, served on a socket that listens."""

    def __init__(self, model: LanguageModel, serving: Serving, listening: socket.socket, *, name: str) -> None:
        self.url, self._listening = url_of(listening), listening
        self.service = Service(model, serving, name=name)
        self._gate = Gate(create_app(self.service), self.service, key=serving.key())
        config = uvicorn.Config(
            self._gate,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=round(LAST_WORDS_S),
        )
        self._server = _Uvicorn(config)
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def has_started(self) -> bool:
        """Whether requests are answered."""
        return self._server.started

    async def run(self, *, heeds_signals: bool) -> None:
        """Serve until somebody asks to stop. Raises TxlError where nothing can be written any more."""
        self._loop = loop = asyncio.get_running_loop()
        if heeds_signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._drain)
        self.service.worker.start(loop, on_failure=self._drain)
        try:
            await self._server.serve(sockets=[self._listening])
        finally:
            self.service.worker.stop()
        if self.service.worker.has_failed:
            raise TxlError("nothing can be written any more; the log says why. Start again, perhaps with fewer --rows.")

    def stop(self) -> None:
        """Drain and end; from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self._draining is not None:  # asked twice: now
            self._server.should_exit = self._server.force_exit = True
            return
        logger.info("draining: %s in work", counted(self._gate.num_active, "request"))
        self.service.is_draining = True
        self._draining = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        end = time.monotonic() + self.service.serving.grace
        while self._gate.num_active and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self.service.worker.set_deadline(by=time.monotonic())
        while self._gate.num_active and time.monotonic() < end + LAST_WORDS_S:
            await asyncio.sleep(0.05)
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Without handlers of signals of its own, which would close the door to those who are to be told 503."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(model: LanguageModel, serving: Serving, listening: socket.socket, *, name: str) -> None:
    """Serve until a signal asks to stop, and all that was begun has ended."""
    for handler in logger.handlers:
        logging.getLogger("uvicorn.error").addHandler(handler)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = Server(model, serving, listening, name=name)
    if not serving.key() and not ipaddress.ip_address(listening.getsockname()[0]).is_loopback:
        logger.warning("whoever reaches this machine may use the model; --api-key-file asks for a key")
    logger.info("%s is served at %s; %s at once", name, server.url, counted(serving.rows, "text"))
    asyncio.run(server.run(heeds_signals=True))
    logger.info("stopped")
