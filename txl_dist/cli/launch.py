"""The verb that starts training under the `deepspeed` launcher and answers for what becomes of it."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NoReturn

from txl_dist.cli.remote_words import check_remote, encode_words
from txl_dist.cli.tyro_events import Argument
from txl_dist.config.foreign_names import SURE, find_counterpart
from txl_dist.config.load import Config, check_config, plan_batch, setting_names
from txl_dist.console.echo import echo, fitted
from txl_dist.console.formatting import counted
from txl_dist.console.suggest import did_you_mean, nearest
from txl_dist.errors import ConfigError
from txl_dist.io.files import read_text

SEEN_WITHIN_S = 30.0
"""A network file system may show so late what rank 0 wrote on another machine."""
DEFAULT_HOSTFILE = "/job/hostfile"
"""What the `deepspeed` launcher reads without --hostfile, if it is there."""
NUMBERS = {
    "--num_gpus": (1, 1 << 20),
    "--num_accelerators": (1, 1 << 20),
    "--num_nodes": (1, 1 << 20),
    "--node_rank": (0, 1 << 20),
    "--master_port": (1, 65535),
    "--ssh_port": (1, 65535),
}
"""Flags of the launcher that take a whole number, with its least and its most."""
TEXTS = (
    *("--hostfile -H", "--include -i", "--exclude -e", "--master_addr", "--launcher", "--launcher_args"),
    *("--enable_each_rank_log", "--autotuning", "--bind_core_list", "--venv_script", "--log_level"),
)
SWITCHES = (
    *("--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid"),
    *("--bind_cores_to_rank", "--quiet -q", "--help -h"),
)
CHOICES = {
    "--launcher": ("pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi"),
    "--log_level": ("debug", "info", "warning", "error", "critical"),
    "--autotuning": ("tune", "run"),
}
"""Flags of the launcher that take one of a few words."""
TRAIN_FLAGS = ("resume", "max_time", "profile", "dry_run", "all", "ranks", "init")
"""Those of `txl train` that are no settings."""
RANKS_PER_CORE = 4
"""Above that a word is said: the ranks of a CPU compute in turns."""
_MOST_SLOTS = 1 << 10
"""Slots that a machine may have before it is asked."""
_MOST_SHOWN = 8
"""Machines that a message lists."""
_SLOT_NUMBERS = re.compile(r"\d{1,6}(,\d{1,6})*", re.ASCII)
_HOST = re.compile(r"(\S+)\s+slots=(\d{1,6})(?!\d)", re.ASCII)
USAGE = """usage: txl launch [launcher flags] CONFIG.toml [train flags]

Train on all GPUs of this machine, or on the nodes of a hostfile: words before the configuration go to the \
`deepspeed` launcher (deepspeed --help), words behind it to `txl train` (txl train CONFIG.toml --help). \
Without GPUs and launcher flags it starts one rank on the CPU; --num_accelerators 2 starts two. On one machine the \
ranks meet at a free port, unless --master_port names one. --verbose shows what the launcher says of itself too.

Unlike the launcher alone it passes SIGTERM, SIGINT and SIGUSR1 on to the ranks, leaves no process behind, and exits \
with
  0     the run is done (RUN/DONE)
  2     a mistake to be mended first
  75    it was stopped and saved: start the same command again
  76    a rank hung or was lost: start the same command again
  else  an error"""


def launch(words: Sequence[str], *, read_settings: Callable[[Sequence[str], bool], Config]) -> int:
    """Train under the `deepspeed` launcher, stopping and exiting cleanly.

    `read_settings`: what the words behind the launcher's flags set; its second argument says that all ranks will run
    on this machine, so that their paths can be checked here.
    """
    verbose = "--verbose" in words
    words = [word for word in words if word != "--verbose"]
    config_at = next((index for index, word in enumerate(words) if word.endswith(".toml")), None)
    if config_at is None:
        if not {"-h", "--help"} & set(words):
            raise ConfigError(
                "no word ends in .toml, which would be the configuration.", "", *fitted(USAGE).splitlines()
            )
        echo(fitted(USAGE))
        return 0
    flags, train_words = list(words[:config_at]), list(words[config_at:])
    asked = _read_flags(flags, train_words)
    slots = _slots(asked.hostfile)
    _check_together(asked, has_hosts=bool(slots))
    _check_choice(asked, slots)
    settings = read_settings(train_words, not slots)
    num_ranks = check_launch(asked, settings, slots=slots)
    from txl_dist.distributed.collectives import uses_gpu
    from txl_dist.distributed.rendezvous import free_port
    from txl_dist.launcher.deepspeed_files import files_for_launcher
    from txl_dist.launcher.launch import launch as run_launcher

    is_on_cpu = not slots and not uses_gpu()
    if is_on_cpu:
        # Without it DeepSpeed looks for other hardware first and may find half-installed drivers.
        os.environ["DS_ACCELERATOR"] = "cpu"
    if not slots and (asked.include or asked.exclude):
        from txl_dist.train.engine.devices import count_devices

        _check_choice(asked, {"localhost": count_devices()})
    if is_on_cpu:
        if not flags:
            flags = ["--num_accelerators", "1"]  # its own choice would be one per NUMA node
            echo("txl launch: no GPU here; one rank on the CPU (--num_accelerators N for more)", to=sys.stderr)
        num_cores = len(os.sched_getaffinity(0))
        if num_ranks > RANKS_PER_CORE * num_cores:
            echo(f"txl launch: {num_ranks} ranks share {counted(num_cores, 'core')}: steps will be slow", to=sys.stderr)
    if not slots and asked.master_port is None:
        flags += ["--master_port", str(free_port())]  # its own is always 29500, which another run may have
    seen_within_s = SEEN_WITHIN_S if slots else 0.0
    if slots:
        train_words = encode_words(train_words)
        if _uses_pdsh(asked, num_hosts=len(_chosen(asked, slots))):
            places = {"this folder": os.getcwd(), "this Python": sys.executable}
            flags_sent = ("--venv_script", "--enable_each_rank_log", "--master_addr")
            values = {flag: getattr(asked, flag.removeprefix("--")) for flag in flags_sent}
            check_remote(places | {flag: value for flag, value in values.items() if value}, environment=os.environ)
    run_dir = Path(settings.run.dir)
    if not slots:
        return run_launcher(flags, train_words, run_dir=run_dir, seen_within_s=seen_within_s, verbose=verbose)
    with files_for_launcher(Path(asked.hostfile or DEFAULT_HOSTFILE)) as files:
        os.environ.update(files.environment)
        flags += files.flags
        return run_launcher(flags, train_words, run_dir=run_dir, seen_within_s=seen_within_s, verbose=verbose)


def launcher_arguments() -> list[Argument]:
    """The flags of the launcher, as a completion script needs them."""
    arguments = []
    for names in (*NUMBERS, *TEXTS, *SWITCHES):
        flag = names.split()[0]
        metavar = "INT" if flag in NUMBERS else "" if names in SWITCHES else "STR"
        takes: Literal["nothing", "one"] = "one" if metavar else "nothing"
        text = "flag of the deepspeed launcher, before the configuration"
        arguments.append(
            Argument((flag,), metavar, text, CHOICES.get(flag, ()), takes=takes, is_list=False, is_required=False)
        )
    return [argument for argument in arguments if argument.names != ("--help",)]


def check_launch(asked: argparse.Namespace, settings: Config, *, slots: Mapping[str, int]) -> int:
    """Refuse what needs no ranks to be seen wrong. Returns their number; 0 where only the launcher knows it.

    `slots`: ranks of each machine of the hostfile; none where there is none. Raises ConfigError.
    """
    from txl_dist.train.run_dir import check_run_dir

    num_local = int(asked.num_accelerators or asked.num_gpus or 0)
    counts = list(slots.values())
    used = counts[: int(asked.num_nodes)] if asked.num_nodes else counts
    num_ranks = num_local * (len(used) or 1) or sum(used)
    if asked.include or asked.exclude:
        num_ranks = sum(map(len, _chosen(asked, slots).values())) if slots else 0
    check_config(settings)
    if num_ranks:
        plan_batch(settings.train, world_size=num_ranks)
    check_run_dir(Path(settings.run.dir), settings)
    return num_ranks


class _Flags(argparse.ArgumentParser):
    """The launcher's flags, read as it reads them, but without importing it, which takes seconds."""

    def __init__(self) -> None:
        super().__init__(add_help=False)
        for names in (*NUMBERS, *TEXTS):
            self.add_argument(*names.split())
        for names in SWITCHES:
            self.add_argument(*names.split(), action="store_true")

    def error(self, message: str) -> NoReturn:
        flag = re.fullmatch(r"argument (\S+): expected one argument", message)
        raise ConfigError(f"{flag[1] if flag else message}{' needs a value' if flag else ''}. See deepspeed --help.")


def _read_flags(flags: Sequence[str], train_words: Sequence[str]) -> argparse.Namespace:
    """What the launcher is asked for, as text, None where nothing is. Raises ConfigError for what it does not know."""
    config = train_words[0]
    asked, unknown = _Flags().parse_known_args(flags)
    if unknown:
        flag = unknown[0].partition("=")[0]
        if flag.removeprefix("--").replace("-", "_") in (*setting_names(), *TRAIN_FLAGS):
            raise ConfigError(f"settings go behind the configuration file: txl launch {config} {' '.join(unknown)}.")
        if not flag.startswith("-"):
            raise ConfigError(f"cannot use {flag!r}: the words before {config} are flags of the launcher.")
        name = flag.lstrip("-").replace("-", "_")
        is_near = nearest(name, _names(), least_alike=SURE)
        if not is_near and (counterpart := find_counterpart(name, setting_names())):
            of_train = counterpart.hint(spell=lambda name, value: f"--{name} {value}".rstrip() + f" after {config}")
            raise ConfigError(f"unknown launcher flag {flag}.{of_train}")
        hint = did_you_mean(flag.lstrip("-"), _names(), spell=lambda name: f"--{name}")
        raise ConfigError(f"unknown launcher flag {flag}.{hint or ' See deepspeed --help.'}")
    counts = Counter(flag.partition("=")[0] for flag in flags if flag.startswith("-"))
    for flag, count in counts.items():
        if count > 1:
            joined = " Join machines by @: worker-1@worker-2:0,1." if flag in ("--include", "--exclude") else ""
            raise ConfigError(f"{flag} is given {count} times, and the launcher takes it once.{joined}")
    for flag, (least, most) in NUMBERS.items():
        value = getattr(asked, flag.removeprefix("--"))
        if value is not None and not (re.fullmatch(r"\d{1,9}", value, re.ASCII) and least <= int(value) <= most):
            raise ConfigError(f"{flag} {value}: it must be a whole number from {least} to {most}.")
    for word, after in zip(train_words, [*train_words[1:], ""], strict=True):
        if word.startswith("--") and word[2:].partition("=")[0] in set(_names()) - {"help"}:
            value = "" if "=" in word or not after or after.startswith("-") else f" {after}"
            raise ConfigError(f"launcher flags go before the configuration file: txl launch {word}{value} {config}.")
    return asked


def _check_together(asked: argparse.Namespace, *, has_hosts: bool) -> None:
    for flag, value in (("--include", asked.include), ("--exclude", asked.exclude)):
        if value == "":
            raise ConfigError(f"{flag} needs a value: NODE:SLOT,SLOT@NODE. Is a variable of the shell unset?")
    if asked.include and asked.exclude:
        raise ConfigError("--include and --exclude cannot be given together. Leave one out.")
    if (asked.include or asked.exclude) and (asked.num_accelerators or asked.num_gpus or asked.num_nodes):
        raise ConfigError(
            "--include and --exclude choose the ranks: leave out --num_accelerators, --num_gpus and --num_nodes."
        )
    for flag, choices in CHOICES.items():
        value = getattr(asked, flag.removeprefix("--"))
        if value is not None and (value.lower() if flag == "--launcher" else value) not in choices:
            raise ConfigError(f"{flag} {value}: it can be {', '.join(choices)}.{did_you_mean(value, choices)}")
    if not has_hosts and int(asked.num_nodes or 1) != 1:
        raise ConfigError(f"--num_nodes {asked.num_nodes} needs the machines: give them by --hostfile.")


def _uses_pdsh(asked: argparse.Namespace, *, num_hosts: int) -> bool:
    """Return whether the launcher starts ranks through pdsh; one machine alone is started without it."""
    return not asked.no_ssh and (asked.force_multi or num_hosts > 1) and (asked.launcher or "pdsh").lower() == "pdsh"


def _names() -> list[str]:
    return [names.split()[0].removeprefix("--") for names in (*NUMBERS, *TEXTS, *SWITCHES)]


def _check_choice(asked: argparse.Namespace, slots: Mapping[str, int]) -> None:
    """Refuse a value of --include or --exclude that the launcher cannot read, or that leaves no rank.

    `slots`: ranks of each machine; none where the machine is this one, and not known yet. Raises ConfigError.
    """
    chosen = _chosen(asked, slots or {"localhost": _MOST_SLOTS})
    if not any(chosen.values()):
        raise ConfigError(f"--exclude {asked.exclude} leaves no rank. Exclude fewer.")
    if slots and asked.no_ssh and not 0 <= int(asked.node_rank or -1) < len(chosen):
        raise ConfigError(f"--no_ssh needs --node_rank, the number of this machine: 0 to {len(chosen) - 1}.")


def _chosen(asked: argparse.Namespace, slots: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the slots of each machine that --include and --exclude leave, in order; machines without any are left out.

    The form is NODE[:SLOT,...][@NODE...]; a machine without slots means all of its slots. Raises ConfigError.
    """
    every = {host: list(range(count)) for host, count in slots.items()}
    value = asked.include or asked.exclude
    if not value:
        return every
    flag = "--include" if asked.include else "--exclude"
    named: dict[str, set[int]] = {}
    for part in value.split("@"):
        host, has_slots, numbers = part.partition(":")
        if host not in every:
            hint = did_you_mean(host, every) or f" There is {', '.join(list(every)[:_MOST_SHOWN])}."
            raise ConfigError(f"{flag} {value}: no machine is called {host!r}.{hint}")
        if has_slots and not _SLOT_NUMBERS.fullmatch(numbers):
            raise ConfigError(
                f"{flag} {value}: {numbers!r} are no slots. Write their numbers with commas: {host}:0,1. "
                f"{host} alone means all."
            )
        wanted = {int(number) for number in numbers.split(",")} if has_slots else set(every[host])
        if lacking := sorted(wanted - set(every[host])):
            few = f"slots 0 to {len(every[host]) - 1}" if len(every[host]) > 1 else "slot 0 alone"
            on_cpu = " On a CPU choose the number of ranks by --num_accelerators N." if host == "localhost" else ""
            raise ConfigError(f"{flag} {value}: {host} has no slot {lacking[0]}, but {few}.{on_cpu}")
        named[host] = named.get(host, set()) | wanted
    if asked.include:
        return {host: sorted(named[host]) for host in every if host in named}
    left = {host: sorted(set(every[host]) - named.get(host, set())) for host in every}
    return {host: numbers for host, numbers in left.items() if numbers}


def _slots(hostfile: str | None) -> dict[str, int]:
    """Ranks of each machine of the hostfile that the launcher will read; none if it will read none."""
    if hostfile is None and not os.path.isfile(DEFAULT_HOSTFILE):
        return {}
    file = hostfile or DEFAULT_HOSTFILE
    a_line = "Give each machine a line `HOST slots=N`."
    try:
        lines = [line.strip() for line in read_text(Path(file)).split("\n")]
    except OSError as error:
        raise ConfigError(f"--hostfile {file}: {error.strerror}. Name a file that is there. {a_line}") from error
    except ValueError as error:
        raise ConfigError(f"--hostfile {file} is no hostfile: it is no text. {a_line}") from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith("#"):
            continue
        found = _HOST.match(line)
        if not found:
            raise ConfigError(f"--hostfile {file} is no hostfile: line {number} is not `HOST slots=N`.")
        if found[1] in hosts:
            raise ConfigError(f"--hostfile {file}: line {number} names {found[1]} again. Give each machine one line.")
        if int(found[2]) < 1:
            raise ConfigError(f"--hostfile {file}: line {number} gives {found[1]} no slots. Leave the line out.")
        hosts[found[1]] = int(found[2])
    if not hosts:
        raise ConfigError(f"--hostfile {file} names no machine. {a_line}")
    return hosts
