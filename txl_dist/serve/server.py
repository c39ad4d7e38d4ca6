"""Process of the server, from start to end.

On SIGTERM or SIGINT the server drains: it refuses new requests, and running requests get up to `--shutdown-timeout`
seconds to end. Then the process ends with exit code 0. A second signal ends the process immediately.
"""

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

FLUSH_S = 5.0
"""Seconds in which output can still be sent to clients after all texts have ended."""


class Server:
    """HTTP server that runs one model on a listening socket. `run` serves until `stop` is called or a signal
    arrives."""

    def __init__(self, model: LanguageModel, serving: Serving, listening: socket.socket, *, name: str) -> None:
        self.url = url_of(listening)
        self._listening = listening
        self.service = Service(model, serving, name=name)
        self._gate = Gate(create_app(self.service), self.service, key=serving.key())
        config = uvicorn.Config(
            self._gate,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=round(FLUSH_S),
        )
        self._server = _Uvicorn(config)
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def has_started(self) -> bool:
        """Whether the server answers requests."""
        return self._server.started

    async def run(self, *, heeds_signals: bool) -> None:
        """Serve until a stop is requested, and then drain.

        `heeds_signals` says whether SIGTERM and SIGINT request a stop. Raises TxlError if the worker has failed and
        cannot generate again.
        """
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
            raise TxlError(
                "the server cannot generate text any more. The log contains the reason. Start the server again. If "
                "the log says that memory ran out, lower --max-num-seqs."
            )

    def stop(self) -> None:
        """Request a stop: the server drains, and then `run` returns. Any thread can call this method."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self._draining is not None:  # the second request ends the server at once
            self._server.should_exit = self._server.force_exit = True
            return
        logger.info("draining: finishing %s", counted(self._gate.num_active, "request"))
        self.service.is_draining = True
        self._draining = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        end = time.monotonic() + self.service.serving.shutdown_timeout
        while self._gate.num_active and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self.service.worker.set_deadline(by=time.monotonic())
        while self._gate.num_active and time.monotonic() < end + FLUSH_S:
            await asyncio.sleep(0.05)
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Server of uvicorn without uvicorn's signal handlers.

    After a signal these handlers would refuse connections, which should get HTTP 503 instead.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_server(model: LanguageModel, serving: Serving, listening: socket.socket, *, name: str) -> None:
    """Serve a model on a listening socket until SIGTERM or SIGINT, and until running requests have ended.

    `name` is the model's name for clients.
    """
    for handler in logger.handlers:
        logging.getLogger("uvicorn.error").addHandler(handler)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = Server(model, serving, listening, name=name)
    if not serving.key() and not ipaddress.ip_address(listening.getsockname()[0]).is_loopback:
        logger.warning("anyone who can reach this machine can use the model. Require a key with --api-key-file")
    logger.info("%s is served at %s; %s at once", name, server.url, counted(serving.max_num_seqs, "text"))
    asyncio.run(server.run(heeds_signals=True))
    logger.info("stopped")
