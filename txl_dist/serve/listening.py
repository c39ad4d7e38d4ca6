"""What can be known to fail before a model is loaded: packages that are missing, a port in use. Imports no torch."""

from __future__ import annotations

import errno
import importlib.util
import socket
from pathlib import Path

from txl_dist.errors import ConfigError
from txl_dist.serve.options import Serving


def require_packages() -> None:
    """Raises ConfigError where the extra is not installed."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f'serving needs the package {package}. Install the extra: pip install "txl_dist[serve]"')


def listen(serving: Serving) -> socket.socket:
    """A socket that listens where clients will ask. Raises ConfigError if it cannot."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            serving.host, serving.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
        listening = socket.socket(family, kind, protocol)  # with its protocol, or asyncio holds small packets back
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
                f"--port, for instance {serving.port + 8000}, and forward the low one to it."
            ) from error
        raise ConfigError(
            f"cannot listen on {serving.host}, port {serving.port}: {error.strerror}. Stop what does, or choose "
            "another --port; 0 takes a free one."
        ) from error
    return listening


def _first_free_port() -> int:
    """The lowest port that needs no privilege on this machine."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 1024


def url_of(listening: socket.socket) -> str:
    """What clients of it ask."""
    host, port, *_ = listening.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
