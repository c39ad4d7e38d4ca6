"""Filter that removes useless lines of the `deepspeed` launcher and its libraries from a run's output.

A line is removed only if its exact form is known, and if people do not need it or can read it elsewhere. All other
output is unchanged, such as tracebacks and errors of other programs. If standard error is a terminal, the ranks get a
terminal of the same width too, so that they show their progress bar.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from contextlib import suppress
from types import FrameType

from txl_dist.errors import HANG, REQUEUE, ConfigError

_DEEPSPEED = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] "
_SAID_BY_US = "|".join(map(str, (ConfigError.exit_code, REQUEUE, HANG)))
_CHATTER = [
    _DEEPSPEED + r"\[(DEBUG|INFO)\] \[\w+\.py:\d+:\w+\] .*",
    # On a node without GPUs; `device=` of the run's first line says it too.
    _DEEPSPEED + r"\[WARNING\] \[real_accelerator\.py:\d+:\w+\] Setting accelerator to CPU\. .*",
    # Exit codes that only a rank gives, after it has said why.
    _DEEPSPEED + rf"\[ERROR\] \[launch\.py:\d+:sigkill_handler\] \[.*\] exits with return code = ({_SAID_BY_US})",
    rf"pdsh@\S+: \S+: ssh exited with exit code ({_SAID_BY_US})",
    r"Detected VISIBLE_DEVICES=\S+: setting --include=\S+",
    r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+",
    # A machine without IPv6 or reverse names; the connection is made another way, or fails with an error of its own.
    r"(\[rank\d+\]:)?\[W[^\]]* socket\.cpp:\d+\] \[c10d\] The hostname of the client socket cannot be retrieved\. .*",
    r"(\[rank\d+\]:)?\[W[^\]]* socket\.cpp:\d+\] \[c10d\] The (server|client) socket cannot be initialized .*"
    r"\(errno: 97 - Address family not supported by protocol\)\.",
]
_NO_HOSTFILE = _DEEPSPEED + r"\[WARNING\] \[runner\.py:\d+:fetch_hostfile\] Unable to find hostfile, .*"
"""Line that is removed unless the user named a hostfile."""
_OF_A_NODE = r"(?:\S+: )?"
"""Prefix that pdsh writes before each line of another machine."""
_PATIENCE_S = 0.1
"""Seconds after which the beginning of an unfinished line is written too, because a progress bar never ends its
line."""
_LONGEST_LINE = 1 << 16


def pattern_of_chatter(*, wants_hostfile: bool) -> re.Pattern[bytes]:
    """Return a pattern that matches the useless lines, which are removed from the output. The pattern matches a whole
    line without its line break."""
    if wants_hostfile:
        patterns = _CHATTER
    else:
        patterns = [*_CHATTER, _NO_HOSTFILE]
    return re.compile(f"{_OF_A_NODE}(?:{'|'.join(patterns)})".encode(), re.DOTALL)


class LineFilter:
    """Filter that removes the lines that match a pattern from a stream of bytes. The bytes can arrive in pieces of any
    size."""

    def __init__(self, chatter: re.Pattern[bytes]) -> None:
        self._chatter = chatter
        self._held = b""
        self.is_inside = False
        """True if the beginning of the current line was returned, so that its end must be returned too."""

    def feed(self, piece: bytes) -> bytes:
        """Take the next bytes of the stream, and return the bytes that pass the filter now.

        The beginning of an unfinished line is kept for the next call. It is returned now if an earlier part of the line
        was returned, or if it is longer than 64 KiB.
        """
        *whole, self._held = (self._held + piece).split(b"\n")
        passed = b""
        for line in whole:
            if self.is_inside or not self._chatter.fullmatch(line.removesuffix(b"\r")):
                passed += line + b"\n"
            self.is_inside = False
        return passed + (self.flush() if self.is_inside or len(self._held) > _LONGEST_LINE else b"")

    def flush(self) -> bytes:
        """Return the beginning of a line that was kept, although the line has not ended."""
        held = self._held
        self._held = b""
        self.is_inside = self.is_inside or bool(held)
        return held


class Strained:
    """Pipes, or a terminal, for the standard output and standard error of a child process. Their lines are filtered and
    written to the streams of this process."""

    def __init__(self, chatter: re.Pattern[bytes]) -> None:
        output, self.stdout = os.pipe()
        if os.isatty(2):
            error, self.stderr = _terminal_like(2)
        else:
            error, self.stderr = os.pipe()
        if os.isatty(2):
            self._width_before = signal.signal(signal.SIGWINCH, self._resize)
        else:
            self._width_before = None
        self._streams = {output: (1, LineFilter(chatter)), error: (2, LineFilter(chatter))}
        self._ends_at_s = float("inf")
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def started(self) -> None:
        """Begin to copy the output of the child process, which has been started."""
        os.close(self.stdout)
        if self._width_before is None:  # a terminal is kept to be resized
            os.close(self.stderr)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(OSError, ValueError):
                stream.flush()  # what was said before comes before
        self._thread.start()

    def close(self) -> None:
        """Write the remaining output of the child process, which has ended.

        The method does not wait for children of that process that still write.
        """
        self._ends_at_s = time.monotonic()
        self._thread.join()
        for descriptor, (target, strainer) in self._streams.items():
            os.close(descriptor)
            if target == 2 and strainer.is_inside:
                _write(target, b"\n")  # our next message begins a line
        if self._width_before is not None:
            signal.signal(signal.SIGWINCH, self._width_before)
            os.close(self.stderr)

    def _carry(self) -> None:
        open_ends = set(self._streams)
        while open_ends:
            is_over = time.monotonic() >= self._ends_at_s
            ready, _, _ = select.select(open_ends, [], [], 0 if is_over else _PATIENCE_S)
            for source in ready:
                target, strainer = self._streams[source]
                piece = _read(source)
                if piece:
                    _write(target, strainer.feed(piece))
                else:
                    _write(target, strainer.flush())
                    open_ends.discard(source)
            if not ready:
                for target, strainer in self._streams.values():
                    _write(target, strainer.flush())
                if is_over:
                    return

    def _resize(self, number: int, frame: FrameType | None) -> None:
        with suppress(OSError, termios.error):
            termios.tcsetwinsize(self.stderr, termios.tcgetwinsize(2))


def _terminal_like(descriptor: int) -> tuple[int, int]:
    """Return (reading end, writing end) of a raw terminal that is as wide as the given terminal."""
    master, slave = os.openpty()
    tty.setraw(slave)
    with suppress(termios.error):
        termios.tcsetwinsize(slave, termios.tcgetwinsize(descriptor))
    return master, slave


def _read(source: int) -> bytes:
    """Return the next bytes of a stream, or empty bytes at its end. A terminal reports its end by an error."""
    try:
        return os.read(source, 1 << 16)
    except OSError:
        return b""


def _write(target: int, data: bytes) -> None:
    """Write all bytes. If the terminal or pipe has closed, the bytes are dropped and the run continues."""
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:  # whoever shares it with us has made it so
            select.select([], [target], [])
        except OSError:
            return
