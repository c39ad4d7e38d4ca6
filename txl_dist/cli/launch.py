"""`txl launch`: check the words of the command, then start the ranks with the `deepspeed` launcher."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from txl_dist.cli.parsing import last_values
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
"""Longest delay in seconds until a network file system shows a file that another machine wrote."""
DEFAULT_HOSTFILE = "/job/hostfile"
"""File that the `deepspeed` launcher reads without --hostfile, if it exists."""
NUMBERS = {
    "--num_gpus": (1, 1 << 20),
    "--num_accelerators": (1, 1 << 20),
    "--num_nodes": (1, 1 << 20),
    "--node_rank": (0, 1 << 20),
    "--master_port": (1, 65535),
    "--ssh_port": (1, 65535),
}
"""Flags of the launcher that take a whole number, each with its smallest and largest value."""
TEXTS = (
    "--hostfile -H",
    "--include -i",
    "--exclude -e",
    "--master_addr",
    "--launcher",
    "--launcher_args",
    "--enable_each_rank_log",
    "--autotuning",
    "--bind_core_list",
    "--venv_script",
    "--log_level",
)
"""Flags of the launcher that take a text, each with its short spelling."""
SWITCHES = (
    "--module",
    "--no_python",
    "--no_local_rank",
    "--no_ssh",
    "--no_ssh_check",
    "--force_multi",
    "--save_pid",
    "--bind_cores_to_rank",
    "--quiet -q",
    "--help -h",
)
"""Flags of the launcher that take no value, each with its short spelling."""
CHOICES = {
    "--launcher": ("pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi"),
    "--log_level": ("debug", "info", "warning", "error", "critical"),
    "--autotuning": ("tune", "run"),
}
"""Flags of the launcher whose value is one of a few words, each flag with the words that it allows."""
TRAIN_FLAGS = ("resume", "max_time", "profile", "dry_run", "all", "ranks", "init")
"""Flags of `txl train` that are not settings."""
RANKS_PER_CORE = 4
"""Largest number of ranks per CPU core without a warning. The ranks of one core compute in turns."""
_MOST_SLOTS = 1 << 10
"""Number of slots (places for ranks) that is assumed for this machine before its devices are counted."""
_MOST_SHOWN = 8
"""Largest number of machines that a message lists."""
_SLOT_NUMBERS = re.compile(r"\d{1,6}(,\d{1,6})*", re.ASCII)
_HOST = re.compile(r"(\S+)\s+slots=(\d{1,6})(?!\d)", re.ASCII)
_SPARES = {
    "--spares": ("--recover.spares", "[01]", "0 or 1, the number of spare processes per node"),
    "--spare-nodes": ("--recover.spare_nodes", r"\d{1,4}", "the number of spare nodes at the end of the hostfile"),
}
"""Setting, pattern and meaning of each launcher flag about spares."""
USAGE = """usage: txl launch [launcher flags] CONFIG.toml [train flags]

Train on all GPUs of this machine, or on the nodes of a hostfile. Flags before the configuration file go to \
the `deepspeed` launcher (deepspeed --help), and flags after it to `txl train` (txl train CONFIG.toml --help). \
Without GPUs, one rank starts on the CPU, or N ranks with --num_accelerators N. On one machine the ranks \
connect through a free port, unless --master_port sets one. --verbose also shows the launcher's own messages. \
--spares 1 replaces a lost rank inside the running job. It sets recover.spares, which also works in `txl train` \
under deepspeed and torchrun. With --spare-nodes K (recover.spare_nodes) the last K nodes of the hostfile get no \
ranks until a node is lost.

SIGTERM, SIGINT and SIGUSR1 are passed on to the ranks. No process remains at the end. Exit codes:
  0     the run is done (RUN/DONE)
  2     a mistake to correct first
  75    stopped and saved: start the same command again
  76    a rank hung or was lost: start the same command again
  else  an error"""


def run_launch(words: Sequence[str], *, read_settings: Callable[[Sequence[str], bool], Config]) -> int:
    """Train under the `deepspeed` launcher, and return the exit code.

    `read_settings` is a function that returns the settings of the run. It gets the words that follow the launcher's
    flags, and True if all ranks will run on this machine. In that case `read_settings` also checks the paths that the
    ranks will use. Raises ConfigError.
    """
    verbose = "--verbose" in words
    words = _with_spares([word for word in words if word != "--verbose"])
    config_at = _index_of_config(words)
    if config_at is None:
        if not {"-h", "--help"} & set(words):
            raise ConfigError(
                "no argument ends in .toml, so the configuration file is missing.", "", *fitted(USAGE).splitlines()
            )
        echo(fitted(USAGE))
        return 0
    flags = list(words[:config_at])
    train_words = list(words[config_at:])
    asked = _read_flags(flags, train_words)
    slots = _slots(asked.hostfile)
    _check_together(asked, has_hosts=bool(slots))
    _check_choice(asked, slots)
    settings = read_settings(train_words, not slots)
    num_ranks = check_launch(asked, settings, slots=slots)
    from txl_dist.launcher.launch import launch_ranks

    run_dir = Path(settings.run.dir)
    has_agents = settings.recover.spares > 0
    if not slots:
        if settings.recover.on_loss != "stop":
            echo(
                f"txl launch: recover.on_loss={settings.recover.on_loss} does not survive the loss of an agent on this "
                "machine, because the deepspeed launcher ends all processes of a node if one of its agents dies",
                to=sys.stderr,
            )
        flags = _flags_for_this_machine(flags, asked, num_ranks=num_ranks)
        return launch_ranks(flags, train_words, run_dir=run_dir, verbose=verbose, has_agents=has_agents)
    from txl_dist.launcher.deepspeed_files import files_for_launcher

    train_words = encode_words(train_words)
    num_hosts = len(_chosen(asked, slots))
    if _uses_pdsh(asked, num_hosts=num_hosts):
        _check_words_for_pdsh(asked)
    with files_for_launcher(Path(asked.hostfile or DEFAULT_HOSTFILE)) as files:
        os.environ.update(files.environment)
        flags += files.flags
        return launch_ranks(
            flags,
            train_words,
            run_dir=run_dir,
            seen_within_s=SEEN_WITHIN_S,
            verbose=verbose,
            has_agents=has_agents,
        )


def _with_spares(words: Sequence[str]) -> list[str]:
    """Return the words with the launcher flags --spares N and --spare-nodes N as settings.

    Raises ConfigError for a wrong value, and for a flag that is repeated, also as a setting with another value.
    """
    config_at = _index_of_config(words)
    kept: list[str] = []
    settings: list[str] = []
    train_words = [] if config_at is None else words[config_at:]
    remaining = iter(words[:config_at])
    for word in remaining:
        flag, is_joined, value = word.partition("=")
        if flag not in _SPARES:
            kept.append(word)
            continue
        setting, pattern, meaning = _SPARES[flag]
        number = value if is_joined else next(remaining, "")
        if not re.fullmatch(pattern, number):
            raise ConfigError(f"{flag} needs {meaning}, not {number!r}.")
        if setting in settings:
            raise ConfigError(f"{flag} is given several times. Give it once.")
        others = last_values(setting, train_words)
        if others not in ([], [number]):
            raise ConfigError(
                f"{flag} {number} and {setting} {' '.join(others)} contradict each other. Leave out one of these flags."
            )
        settings += [setting, number]
    return [*kept, *train_words, *settings]


def _index_of_config(words: Sequence[str]) -> int | None:
    """Return the index of the configuration file, the first word that ends in .toml, or None if there is none."""
    for index, word in enumerate(words):
        if word.endswith(".toml"):
            return index
    return None


def _flags_for_this_machine(flags: Sequence[str], asked: argparse.Namespace, *, num_ranks: int) -> list[str]:
    """Return the launcher's flags for ranks on this machine only. Raises ConfigError for slots that do not exist."""
    from txl_dist.distributed.collectives import uses_gpu
    from txl_dist.distributed.rendezvous import free_port

    completed = list(flags)
    is_on_cpu = not uses_gpu()
    if is_on_cpu:
        # Without it DeepSpeed looks for other hardware first and may find half-installed drivers.
        os.environ["DS_ACCELERATOR"] = "cpu"
    if asked.include or asked.exclude:
        from txl_dist.train.engine.devices import count_devices

        _check_choice(asked, {"localhost": count_devices()})
    if is_on_cpu:
        if not flags:
            completed = ["--num_accelerators", "1"]  # the launcher's default is one per NUMA node
            echo(
                "txl launch: no GPU found. Starting one rank on the CPU (for N ranks: --num_accelerators N)",
                to=sys.stderr,
            )
        num_cores = len(os.sched_getaffinity(0))
        if num_ranks > RANKS_PER_CORE * num_cores:
            echo(
                f"txl launch: {num_ranks} ranks share {counted(num_cores, 'CPU core')}, so steps will be slow",
                to=sys.stderr,
            )
    if asked.master_port is None:
        completed += ["--master_port", str(free_port())]  # the default is 29500, which another run may use
    return completed


def _check_words_for_pdsh(asked: argparse.Namespace) -> None:
    """Refuse paths and values that pdsh would change when it sends them to other machines. Raises ConfigError."""
    places = {"this folder": os.getcwd(), "this Python": sys.executable}
    for flag in ("--venv_script", "--enable_each_rank_log", "--master_addr"):
        value = _value_of(asked, flag)
        if value:
            places[flag] = value
    check_remote(places, environment=os.environ)


def _value_of(asked: argparse.Namespace, flag: str) -> Any:
    """Return the value of a launcher flag, or None if the flag was not given."""
    return getattr(asked, flag.removeprefix("--"))


def launcher_arguments() -> list[Argument]:
    """Return descriptions of the launcher's flags, for a completion script."""
    arguments = []
    for names in (*NUMBERS, *TEXTS, *SWITCHES):
        flag = names.split()[0]
        if flag == "--help":
            continue
        metavar = "STR"
        if flag in NUMBERS:
            metavar = "INT"
        elif names in SWITCHES:
            metavar = ""
        takes: Literal["nothing", "one"] = "one" if metavar else "nothing"
        argument = Argument(
            (flag,),
            metavar,
            "flag of the deepspeed launcher, given before the configuration file",
            CHOICES.get(flag, ()),
            takes=takes,
            is_list=False,
            is_required=False,
        )
        arguments.append(argument)
    return arguments


def check_launch(asked: argparse.Namespace, settings: Config, *, slots: Mapping[str, int]) -> int:
    """Refuse mistakes that can be found before ranks start. Returns the number of ranks.

    The number is 0 if only the launcher knows it. `slots` maps each machine of the hostfile to its number of ranks, and
    is empty without a hostfile. Raises ConfigError.
    """
    from txl_dist.train.run_dir import check_run_dir

    num_ranks = _num_ranks(asked, slots)
    check_config(settings)
    num_spare = _num_spare_ranks(asked, settings.recover.spare_nodes, slots, num_ranks=num_ranks)
    if num_ranks:
        plan_batch(settings.train, world_size=num_ranks - num_spare)
    check_run_dir(Path(settings.run.dir), settings)
    return num_ranks


def _num_spare_ranks(asked: argparse.Namespace, spare_nodes: int, slots: Mapping[str, int], *, num_ranks: int) -> int:
    """Return the number of processes that get no rank at the start. Raises ConfigError if no node is left for ranks."""
    if not spare_nodes:
        return 0
    if not slots:
        raise ConfigError(
            f"recover.spare_nodes={spare_nodes} needs a hostfile, because the last nodes of the hostfile are the spare "
            "nodes. Give one with --hostfile, or leave out the spare nodes."
        )
    nodes = _chosen(asked, slots)
    sizes = [len(numbers) for numbers in nodes.values()][: int(asked.num_nodes or len(nodes))]
    num_nodes = len(sizes)
    if spare_nodes >= num_nodes:
        raise ConfigError(
            f"recover.spare_nodes={spare_nodes} leaves none of {counted(num_nodes, 'node')} for ranks. List more nodes "
            "in the hostfile, or lower it."
        )
    if len(set(sizes)) > 1 and not (asked.num_accelerators or asked.num_gpus):
        raise ConfigError("recover.spare_nodes needs the same number of slots on every node of the hostfile.")
    return spare_nodes * (num_ranks // num_nodes)


def _num_ranks(asked: argparse.Namespace, slots: Mapping[str, int]) -> int:
    """Return the number of ranks that will start, or 0 if only the launcher knows it."""
    if asked.include or asked.exclude:
        if not slots:
            return 0
        chosen = _chosen(asked, slots)
        return sum(len(numbers) for numbers in chosen.values())
    counts = list(slots.values())
    if asked.num_nodes:
        counts = counts[: int(asked.num_nodes)]
    num_per_machine = int(asked.num_accelerators or asked.num_gpus or 0)
    if num_per_machine:
        return num_per_machine * (len(counts) or 1)
    return sum(counts)


class _Flags(argparse.ArgumentParser):
    """Parser of the launcher's flags, which reads them as the launcher does.

    It exists because importing the launcher's own parser would take seconds.
    """

    def __init__(self) -> None:
        super().__init__(add_help=False)
        for names in (*NUMBERS, *TEXTS):
            self.add_argument(*names.split())
        for names in SWITCHES:
            self.add_argument(*names.split(), action="store_true")

    def error(self, message: str) -> NoReturn:
        match = re.fullmatch(r"argument (\S+): expected one argument", message)
        if match:
            message = f"{match[1]} needs a value"
        raise ConfigError(f"{message}. See deepspeed --help.")


def _read_flags(flags: Sequence[str], train_words: Sequence[str]) -> argparse.Namespace:
    """Parse the launcher's flags. The values are texts, or None if a flag is absent. Raises ConfigError."""
    config = train_words[0]
    asked, unknown = _Flags().parse_known_args(flags)
    if unknown:
        raise ConfigError(_unknown_flag(unknown, config=config))
    counts = Counter(flag.partition("=")[0] for flag in flags if flag.startswith("-"))
    for flag, count in counts.items():
        if count > 1:
            if flag in ("--include", "--exclude"):
                remedy = " Join the names of machines with @: worker-1@worker-2:0,1."
            else:
                remedy = ""
            raise ConfigError(f"{flag} is given {count} times, but the launcher accepts the flag only once.{remedy}")
    for flag, (least, most) in NUMBERS.items():
        value = _value_of(asked, flag)
        if value is not None and not _is_number(value, least=least, most=most):
            raise ConfigError(f"{flag} {value}: it must be a whole number from {least} to {most}.")
    _check_order(train_words)
    return asked


def _unknown_flag(unknown: Sequence[str], *, config: str) -> str:
    """Return the message for words before the configuration file that are not flags of the launcher.

    The message is about the first such word.
    """
    flag = unknown[0].partition("=")[0]
    if flag.removeprefix("--").replace("-", "_") in (*setting_names(), *TRAIN_FLAGS):
        return f"settings go after the configuration file: txl launch {config} {' '.join(unknown)}."
    if not flag.startswith("-"):
        return f"cannot use {flag!r}: only flags of the launcher can precede {config}."
    name = flag.lstrip("-").replace("-", "_")
    if not nearest(name, _names(), least_alike=SURE):
        counterpart = find_counterpart(name, setting_names())
        if counterpart:
            hint = counterpart.hint(spell=lambda name, value: f"--{name} {value}".rstrip() + f" after {config}")
            return f"unknown launcher flag {flag}.{hint}"
    hint = did_you_mean(flag.lstrip("-"), _names(), spell=lambda name: f"--{name}")
    return f"unknown launcher flag {flag}.{hint or ' See deepspeed --help.'}"


def _is_number(text: str, *, least: int, most: int) -> bool:
    """Return True if a text is a whole number within the limits."""
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        return False
    return least <= int(text) <= most


def _check_order(train_words: Sequence[str]) -> None:
    """Refuse flags of the launcher after the configuration file, which is the first word. Raises ConfigError."""
    config = train_words[0]
    launcher_names = set(_names()) - {"help"}
    for index, word in enumerate(train_words):
        if not word.startswith("--") or word[2:].partition("=")[0] not in launcher_names:
            continue
        value = ""
        following = "".join(train_words[index + 1 : index + 2])
        if following and "=" not in word and not following.startswith("-"):
            value = f" {following}"
        raise ConfigError(f"launcher flags go before the configuration file: txl launch {word}{value} {config}.")


def _check_together(asked: argparse.Namespace, *, has_hosts: bool) -> None:
    """Refuse flags that contradict each other, and values that are not among the choices. Raises ConfigError."""
    for flag, value in (("--include", asked.include), ("--exclude", asked.exclude)):
        if value == "":
            raise ConfigError(
                f"{flag} needs the names of machines. Numbers of slots (ranks of a machine) can follow a name, for "
                f"instance {flag} node1:0,1@node2. Is a shell variable unset?"
            )
    if asked.include and asked.exclude:
        raise ConfigError("--include and --exclude cannot be given together. Leave out one of these flags.")
    if (asked.include or asked.exclude) and (asked.num_accelerators or asked.num_gpus or asked.num_nodes):
        raise ConfigError(
            "--include or --exclude already chooses the ranks. Leave out --num_accelerators, --num_gpus and "
            "--num_nodes."
        )
    for flag, choices in CHOICES.items():
        value = _value_of(asked, flag)
        if value is None:
            continue
        if flag == "--launcher":
            compared = value.lower()
        else:
            compared = value
        if compared not in choices:
            raise ConfigError(f"{flag} {value}: it can be {', '.join(choices)}.{did_you_mean(value, choices)}")
    if not has_hosts and int(asked.num_nodes or 1) != 1:
        raise ConfigError(
            f"--num_nodes {asked.num_nodes} needs the names of the machines. Write the names to a file, and give the "
            "file with --hostfile."
        )


def _uses_pdsh(asked: argparse.Namespace, *, num_hosts: int) -> bool:
    """Return True if the launcher starts ranks through pdsh. Ranks on one machine are started without pdsh."""
    if asked.no_ssh:
        return False
    is_multi_node = asked.force_multi or num_hosts > 1
    return is_multi_node and (asked.launcher or "pdsh").lower() == "pdsh"


def _names() -> list[str]:
    """Return the long names of the launcher's flags, without dashes."""
    return [names.split()[0].removeprefix("--") for names in (*NUMBERS, *TEXTS, *SWITCHES)]


def _check_choice(asked: argparse.Namespace, slots: Mapping[str, int]) -> None:
    """Refuse a value of --include or --exclude that the launcher cannot read, or that leaves no rank.

    `slots` maps each machine to its number of ranks. Before this machine's devices are counted, `slots` is empty.
    Raises ConfigError.
    """
    chosen = _chosen(asked, slots or {"localhost": _MOST_SLOTS})
    if not any(chosen.values()):
        raise ConfigError(f"--exclude {asked.exclude} leaves no rank. Exclude fewer ranks.")
    if slots and asked.no_ssh and not 0 <= int(asked.node_rank or -1) < len(chosen):
        raise ConfigError(f"--no_ssh needs --node_rank, the number of this machine: 0 to {len(chosen) - 1}.")


def _chosen(asked: argparse.Namespace, slots: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the slots of each machine that remain after --include and --exclude, in order. Raises ConfigError.

    Machines without a remaining slot are left out. The form of both flags is NODE[:SLOT,...][@NODE...]. A machine that
    is named without slots stands for all of its slots.
    """
    every = {host: list(range(count)) for host, count in slots.items()}
    value = asked.include or asked.exclude
    if not value:
        return every
    if asked.include:
        flag = "--include"
    else:
        flag = "--exclude"
    named: dict[str, set[int]] = {}
    for part in value.split("@"):
        host, has_slots, numbers = part.partition(":")
        if host not in every:
            hint = did_you_mean(host, every) or f" Known machines: {', '.join(list(every)[:_MOST_SHOWN])}."
            raise ConfigError(f"{flag} {value}: no machine is called {host!r}.{hint}")
        if has_slots and not _SLOT_NUMBERS.fullmatch(numbers):
            raise ConfigError(
                f"{flag} {value}: {numbers!r} are not slot numbers. Separate slot numbers by commas: {host}:0,1. "
                f"Without slot numbers, {host} means all slots of this machine."
            )
        available = set(every[host])
        if has_slots:
            chosen = {int(number) for number in numbers.split(",")}
        else:
            chosen = available
        lacking = sorted(chosen - available)
        if lacking:
            if len(available) > 1:
                existing = f"slots 0 to {len(available) - 1}"
            else:
                existing = "slot 0"
            if host == "localhost":
                remedy = " On a CPU, set the number of ranks with --num_accelerators N."
            else:
                remedy = ""
            raise ConfigError(f"{flag} {value}: {host} has no slot {lacking[0]}, only {existing}.{remedy}")
        named.setdefault(host, set()).update(chosen)
    if asked.include:
        return {host: sorted(named[host]) for host in every if host in named}
    remaining = {}
    for host, numbers_of_host in every.items():
        excluded = named.get(host, set())
        left = [number for number in numbers_of_host if number not in excluded]
        if left:
            remaining[host] = left
    return remaining


def _slots(hostfile: str | None) -> dict[str, int]:
    """Return the number of ranks of each machine in the hostfile that the launcher will read.

    The result is empty without a hostfile. Raises ConfigError for a file that cannot be read or is not a hostfile.
    """
    if hostfile is None and not os.path.isfile(DEFAULT_HOSTFILE):
        return {}
    file = hostfile or DEFAULT_HOSTFILE
    remedy = "Write a line `HOST slots=N` for each machine."
    try:
        lines = [line.strip() for line in read_text(Path(file)).split("\n")]
    except OSError as error:
        raise ConfigError(f"--hostfile {file}: {error.strerror}. Name an existing file. {remedy}") from error
    except ValueError as error:
        raise ConfigError(f"--hostfile {file} is not a hostfile, because the file is not text. {remedy}") from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith("#"):
            continue
        match = _HOST.match(line)
        if not match:
            raise ConfigError(f"--hostfile {file} is not a hostfile: line {number} must have the form `HOST slots=N`.")
        host = match[1]
        num_slots = int(match[2])
        if host in hosts:
            raise ConfigError(
                f"--hostfile {file}: line {number} names {host} a second time. Write one line per machine."
            )
        if num_slots < 1:
            raise ConfigError(f"--hostfile {file}: line {number} gives {host} no slots. Remove this line.")
        hosts[host] = num_slots
    if not hosts:
        raise ConfigError(f"--hostfile {file} names no machine. {remedy}")
    return hosts
