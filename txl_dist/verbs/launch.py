"""The verb that starts training under the `deepspeed` launcher and answers for what becomes of it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from txl_dist.config import Config
from txl_dist.console import say
from txl_dist.errors import ConfigError

SEEN_WITHIN_S = 30.0
"""A network file system may show so late what rank 0 wrote on another machine."""
DEFAULT_HOSTFILE = "/job/hostfile"
"""What the `deepspeed` launcher reads without --hostfile, if it is there."""
USAGE = """usage: txl launch [launcher flags] CONFIG.toml [train flags]

Train on all GPUs of this machine, or on the nodes of a hostfile: words before the configuration go to the
`deepspeed` launcher (deepspeed --help), words behind it to `txl train` (txl train CONFIG.toml --help).
Without GPUs and launcher flags it starts one rank on the CPU; --num_accelerators 2 starts two. On one machine the
ranks meet at a free port, unless --master_port names one. --verbose shows what the launcher says of itself too.

Unlike the launcher alone it passes SIGTERM, SIGINT and SIGUSR1 on to the ranks, leaves no process behind, and exits
  0   the run is done (RUN/DONE)          75  it was stopped and saved: start the same command again
  76  a rank hung or was lost: again too    2   a mistake to be mended first        else: an error"""


def launch(words: Sequence[str], *, read_settings: Callable[[Sequence[str]], Config]) -> int:
    """Train under the `deepspeed` launcher, stopping and exiting cleanly."""
    verbose = "--verbose" in words
    words = [word for word in words if word != "--verbose"]
    config_at = next((index for index, word in enumerate(words) if word.endswith(".toml")), None)
    if config_at is None:
        if not {"-h", "--help"} & set(words):
            raise ConfigError(f"no word ends in .toml, which would be the configuration.\n\n{USAGE}")
        say(USAGE)
        return 0
    flags, train_words = list(words[:config_at]), list(words[config_at:])
    settings = read_settings(train_words)
    from txl_dist.dist import uses_gpu
    from txl_dist.ops.launcher import launch as run_launcher

    is_other_machines = any(flag.startswith(("-H", "--host")) for flag in flags) or os.path.isfile(DEFAULT_HOSTFILE)
    if not is_other_machines and not uses_gpu():
        # Without it DeepSpeed looks for other hardware first and may find half-installed drivers.
        os.environ["DS_ACCELERATOR"] = "cpu"
        if not flags:
            flags = ["--num_accelerators", "1"]  # its own choice would be one per NUMA node
            say("txl launch: no GPU here; one rank on the CPU (--num_accelerators N for more)", to=sys.stderr)
    if not is_other_machines and not any(flag.startswith("--master_port") for flag in flags):
        flags += ["--master_port", str(_free_port())]  # its own is always 29500, which another run may have
    seen_within_s = SEEN_WITHIN_S if is_other_machines else 0.0
    run_dir = Path(settings.run.dir)
    return run_launcher(flags, train_words, run_dir=run_dir, seen_within_s=seen_within_s, verbose=verbose)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
