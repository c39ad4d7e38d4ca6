"""A `txl` for shell blocks that starts at once: it passes its arguments to a server, which forks a prepared process.

    bash -c "txl evaluate ... | head" --> this txl --socket--> server (a thread of pytest) --fork--> `txl evaluate ...`

The forked process has the arguments, the folder, the environment and the open files of the `txl` that the shell
started. This `txl` waits and ends with the exit code of the forked process. Without the server, the forty commands of a
page would import torch forty times.
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
from multiprocessing import connection
from pathlib import Path

from tests.helpers import forked

CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    server.sendall(json.dumps([os.getpid(), os.getcwd(), dict(os.environ), sys.argv[1:]]).encode() + b"\\n")
    code = int(server.makefile().readline())
os._exit(code if code >= 0 else 128 - code)
"""


class _Call(socketserver.StreamRequestHandler):
    """One start of `txl`."""

    def handle(self) -> None:
        pid, cwd, variables, words = json.loads(self.rfile.readline())
        files = [Path(f"/proc/{pid}/fd/{number}") for number in range(3)]
        stdin, out, err = files
        process = forked.start(
            forked.run_txl, *words, variables=variables, cwd=Path(cwd), stdin=stdin, out=out, err=err
        )
        connection.wait([process.sentinel, self.connection])
        if process.exitcode is None:  # who asked is gone, with the shell that a test has given up
            process.kill()
        process.join()
        self.wfile.write(f"{process.exitcode}\n".encode())


def serve(folder: Path) -> socketserver.ThreadingUnixStreamServer:
    """Start the server, and put the `txl` that asks it into `folder`. The caller shuts it down."""
    address = str(folder / "socket")
    server = socketserver.ThreadingUnixStreamServer(address, _Call)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (folder / "txl").write_text(CLIENT.format(python=sys.executable, address=address), encoding="utf-8")
    (folder / "txl").chmod(0o755)
    return server
