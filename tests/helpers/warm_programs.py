"""A `txl` and a `python` that start at once: they pass their arguments to a server, which forks a prepared process.

    bash -c "txl evaluate ... | head" --> this txl --socket--> server (a thread of pytest) --fork--> `txl evaluate ...`

The forked process has the arguments, the folder, the environment and the open files of the program that was started.
That program waits and ends with the exit code of the forked process. Without the server, the forty commands of a page
would import torch forty times. The conftest has the folder with both programs as the fixture `warm_bin`.
"""

from __future__ import annotations

import contextlib
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
    server.sendall(json.dumps([os.getpid(), os.getcwd(), dict(os.environ), __file__, *sys.argv[1:]]).encode() + b"\\n")
    code = int(server.makefile().readline())
os._exit(code if code >= 0 else 128 - code)
"""


class _Call(socketserver.StreamRequestHandler):
    """One start of a program."""

    def handle(self) -> None:
        pid, cwd, variables, program, *words = json.loads(self.rfile.readline())
        files = [Path(f"/proc/{pid}/fd/{number}") for number in range(3)]
        stdin, out, err = files
        call = (forked.run_txl,) if Path(program).name == "txl" else (forked.run_python_as, program)
        process = forked.start(*call, *words, variables=variables, cwd=Path(cwd), stdin=stdin, out=out, err=err)
        connection.wait([process.sentinel, self.connection])
        if process.exitcode is None:  # who asked is gone, with the shell that a test has given up
            process.kill()
        process.join()
        with contextlib.suppress(BrokenPipeError):  # who asked may be gone
            self.wfile.write(f"{process.exitcode}\n".encode())


def serve(folder: Path) -> socketserver.ThreadingUnixStreamServer:
    """Start the server, and put the programs that ask it into `folder`. The caller shuts it down."""
    address = str(folder / "socket")
    server = socketserver.ThreadingUnixStreamServer(address, _Call)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("txl", "python"):
        (folder / name).write_text(CLIENT.format(python=sys.executable, address=address), encoding="utf-8")
        (folder / name).chmod(0o755)
    return server
