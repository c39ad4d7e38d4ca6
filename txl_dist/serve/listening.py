"""Checks that run before a model is loaded: missing packages, and a port that is in use.

This module imports no torch.
"""

from __future__ import annotations

import errno
import importlib.util
import socket
from pathlib import Path

from txl_dist.errors import ConfigError
from txl_dist.serve.options import Serving


def require_packages() -> None:
    """Raise ConfigError if the packages of the extra `serve` are not installed."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f'serving needs the package {package}. Install the extra: pip install "txl_dist[serve]"')


def listen(serving: Serving) -> socket.socket:
    """Return a socket that listens at the host and port of `serving`. Raises ConfigError if this host or port cannot be
    used."""
    try:
        addresses = socket.getaddrinfo(
            serving.host, serving.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = addresses[0]
        # asyncio sets TCP_NODELAY only on sockets that have their protocol; without it small packets are delayed.
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {serving.host}: {error}. Choose another --host.") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"--port {serving.port}: ports below {_first_free_port()} are reserved for root. Choose a higher "
                f"--port, for instance {serving.port + 8000}, and forward port {serving.port} to the higher port."
            ) from error
        raise ConfigError(
            f"cannot listen on {serving.host}, port {serving.port}: {error.strerror}. Stop the program that uses this "
            "port, or choose another --port. With --port 0 the server chooses a free port."
        ) from error
    return listening


def _first_free_port() -> int:
    """Return the lowest port that a program without privileges can use on this machine."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 1024


def url_of(listening: socket.socket) -> str:
    """Return the URL at which clients reach a listening socket."""
    host, port, *_ = listening.getsockname()
    if ":" in host:  # IPv6
        host = f"[{host}]"
    return f"http://{host}:{port}"
