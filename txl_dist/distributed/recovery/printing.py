"""Lines about recovery for people, on standard error. The agents print them, and the coordinator in the first one."""

from __future__ import annotations

import sys
from contextlib import suppress

from txl_dist.console.echo import echo


def say(text: str) -> None:
    """Print a line about recovery, if the terminal is still there."""
    with suppress(OSError):
        echo(f"txl: recovery: {text}", to=sys.stderr, flush=True)
