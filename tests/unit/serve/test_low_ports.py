"""For a port that needs root, the error names a port that does not."""

from __future__ import annotations

import errno
import socket

import pytest

from txl_dist.errors import ConfigError
from txl_dist.serve.listening import listen
from txl_dist.serve.options import Serving


@pytest.mark.parametrize("port", [80, 443, 1023])
def test_a_port_that_needs_root_is_refused_with_a_higher_one(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(ConfigError, match=rf"--port {port}: ports below \d+ are reserved .* {port + 8000}"):
        listen(Serving(port=port))
