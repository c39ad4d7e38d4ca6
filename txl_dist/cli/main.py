"""Entry point of the command line. It parses the words, loads the configuration and calls the command.

Each command is a function, and most of these functions are in the other modules of `cli`. The library tyro makes a
command's flags and help from the function's signature. Heavy modules are imported inside the functions, so that
`--help` is fast.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import FlagConversionOff, Positional

from txl_dist import __version__
from txl_dist.cli.completion import Command, Shell, completion_script
from txl_dist.cli.data import prepare, verify
from txl_dist.cli.doctor import doctor
from txl_dist.cli.generate import generate
from txl_dist.cli.inspect import inspect
from txl_dist.cli.launch import launcher_arguments, run_launch
from txl_dist.cli.model import evaluate, export, import_
from txl_dist.cli.parsing import announce_ranks, call, check_typos, complete_switches, flags_in, parse
from txl_dist.cli.plan import PlanArguments, run_plan
from txl_dist.cli.recl import recl
from txl_dist.cli.remote_words import decode_words
from txl_dist.cli.report import compare, report
from txl_dist.cli.serve import serve
from txl_dist.cli.sweep import SweepArguments, run_sweep
from txl_dist.cli.train import check_config_file, usage
from txl_dist.cli.typed_text import decode_texts
from txl_dist.cli.tyro_events import Argument, list_arguments
from txl_dist.config.foreign_names import find_command
from txl_dist.config.job_settings import hash_of_job
from txl_dist.config.load import Config, changed, choices_of, load_config, setting_names, settle_lanes
from txl_dist.config.phases import max_ranks
from txl_dist.config.registry import load_plugins, plugins_text
from txl_dist.config.renamed import rename_variables, words_in_new_names
from txl_dist.console.echo import LostOutputError, drop_output, echo, flush_output, guard_streams
from txl_dist.console.formatting import counted
from txl_dist.console.suggest import did_you_mean
from txl_dist.distributed.rank_environment import read_rank_environment, without_local_rank
from txl_dist.distributed.recovery.seat import CONFIG_COPY, AgentOptions
from txl_dist.errors import ConfigError, TxlError, missing_package
from txl_dist.train.monitoring.preemption import launchers, parse_duration
from txl_dist.train.run_dir import check_paths, finished_lines


@dataclass(frozen=True)
class TrainArguments:
    """Train a model, or resume a run. The file overrides the defaults, and flags override the file."""

    config: Positional[Path]
    """TOML file with the settings, see configs/."""
    settings: Annotated[FlagConversionOff[Config], tyro.conf.arg(name="")]
    resume: str = "auto"
    """auto: resume from the newest whole checkpoint, if any. must: require a checkpoint. never: refuse to resume. PATH:
    resume from this checkpoint."""
    max_time: str = ""
    """Save and exit with code 75 after this much time: 90s, 15m, 2h30m or 2:30:00."""
    profile: str = ""
    """First and last step, for example 20:22. A torch profiler trace of these steps is written to the run directory."""
    dry_run: bool = False
    """Do not train, but print changed settings, batch, parameters, memory and operations."""
    all: bool = False
    """With --dry-run: print all settings."""
    ranks: int = 1
    """With --dry-run: number of ranks to assume. `txl launch` starts ranks."""
    init: str = ""
    """Bundle with the initial weights of a new run (short for --run.init)."""


def train(argv: Sequence[str]) -> int:
    """Train a model, or resume a run. Exit code 75 means stopped on request and saved. The same command then
    resumes."""
    if not argv:
        echo(usage(), to=sys.stderr)
        return 2
    arguments = _train_arguments(argv)
    if arguments.all and not arguments.dry_run:
        raise ConfigError("--all works only with --dry-run. Add --dry-run, or leave out --all.")
    if arguments.ranks != 1 and not arguments.dry_run:
        raise ConfigError(_how_to_start_ranks(argv, num_ranks=arguments.ranks))
    _check_paths(arguments)
    if arguments.dry_run:
        from txl_dist.planning.dry_run import dry_run

        settings = arguments.settings
        resume = arguments.resume
        echo("\n".join(dry_run(settings, world_size=arguments.ranks, resume=resume, shows_all=arguments.all)))
        return 0
    if arguments.max_time:
        max_time_s = parse_duration(arguments.max_time)
    else:
        max_time_s = 0.0
    if arguments.resume in ("auto", "must") and (lines := _finished_lines(arguments, argv)):
        echo("\n".join(lines), to=sys.stderr)
        return 0
    recover = arguments.settings.recover
    if recover.spares:
        from txl_dist.distributed.recovery.seat import read_seat
        from txl_dist.distributed.recovery.spare import supervise

        if read_seat(os.environ) is None:  # the ranks that an agent starts have the number of ranks without spare nodes
            _check_spare_nodes(recover.spare_nodes)
        supervise(["train", *argv], agent_options(arguments.settings))
    else:
        announce_ranks()
    from txl_dist.distributed.malloc import give_memory_back

    give_memory_back()  # before torch is imported
    if recover.spares:
        from txl_dist.distributed.recovery.spare import is_spare, serve_replacements
        from txl_dist.train.monitoring.member import preload

        preload(allow_gpu=recover.allow_gpu, on_loss=recover.on_loss)
        if is_spare(os.environ):
            serve_replacements()  # returns in a process that takes the place of a lost rank
        else:
            announce_ranks()
    from txl_dist.train.report.profile import parse_steps
    from txl_dist.train.start import pretrain

    max_steps = arguments.settings.train.max_steps
    if arguments.profile:
        traced = parse_steps(arguments.profile, max_steps=max_steps)
    else:
        traced = range(0)
    result = pretrain(arguments.settings, resume=arguments.resume, max_time_s=max_time_s, profile=traced)
    return result.exit_code


def _check_spare_nodes(spare_nodes: int) -> None:
    """Check that ranks are left beside the spare nodes. Raises ConfigError."""
    place = read_rank_environment(os.environ)
    if spare_nodes and spare_nodes * place.local_size >= place.world_size:
        raise ConfigError(
            f"recover.spare_nodes={spare_nodes} with {counted(place.local_size, 'process', 'processes')} per node "
            f"leaves no rank of {place.world_size}. Start on more nodes, or set recover.spare_nodes to 0."
        )


def agent_options(settings: Config) -> AgentOptions:
    """Return the options of the agents that replace lost ranks of a run with these settings."""
    recover = settings.recover
    return AgentOptions(
        silent_s=recover.silent_s,
        max_in_row=recover.max_in_row,
        copies=recover.copies,
        on_loss=recover.on_loss,
        max_ranks=max_ranks(settings),
        spare_nodes=recover.spare_nodes,
        run_dir=settings.run.dir,
        join_s=2.0 * settings.engine.start_timeout_s,
        settings_hash=hash_of_job(settings.model_dump(mode="json")),
        plugins=plugins_text(),
    )


def _check_paths(arguments: TrainArguments) -> None:
    """Check the paths in a run's settings. Raises ConfigError."""
    run = arguments.settings.run
    check_paths(arguments.settings.data.paths, run_dir=run.dir, init=run.init, resume=arguments.resume)


def _finished_lines(arguments: TrainArguments, words: Sequence[str]) -> list[str]:
    """Return lines about a run that is already finished, or no lines if the run is not finished. This function does not
    import torch.

    A rank that a launcher started gets no lines, because the launcher expects that its ranks start and end as usual.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1" or launchers():
        return []
    settings = arguments.settings
    command = shlex.join(["txl", "train", *_without_flag("--train.max-steps", words)])
    return finished_lines(Path(settings.run.dir), settings, command=command)


def launch(argv: Sequence[str]) -> int:
    """Train under the `deepspeed` launcher, on one machine or several, with clean stops and exit codes."""

    def read_settings(words: Sequence[str], is_here: bool) -> Config:
        arguments = _train_arguments(words)
        if arguments.dry_run:
            raise ConfigError("--dry-run needs no launcher. Use `txl train CONFIG --dry-run --ranks N`.")
        if arguments.ranks != 1:
            raise ConfigError(_how_to_start_ranks(words, num_ranks=arguments.ranks))
        if is_here:
            _check_paths(arguments)
        return arguments.settings

    return run_launch(argv, read_settings=read_settings)


def _how_to_start_ranks(words: Sequence[str], *, num_ranks: int) -> str:
    """Return the message that --ranks does not start ranks, with the command that does."""
    if num_ranks < 1:
        return f"--ranks {num_ranks}: it must be 1 or more, and works only with --dry-run."
    others = _without_flag("--ranks", words)
    command = shlex.join(["txl", "launch", "--num_accelerators", str(num_ranks), *others])
    return (
        f"--ranks {num_ranks} starts no ranks, because --ranks is only for --dry-run. To train on {num_ranks} ranks: "
        f"{command}"
    )


def plan(argv: Sequence[str]) -> int:
    """Predict memory, speed, duration and scaling of a run on GPUs that this machine does not have."""
    run_plan(argv, read_settings=lambda words: _train_arguments(words, prog="txl plan").settings)
    return 0


def sweep(argv: Sequence[str]) -> int:
    """Train over a grid of settings, and name the best point and its margin over the second-best point."""
    return run_sweep(argv, read_settings=lambda words: _train_arguments(words, prog="txl sweep").settings)


def _train_arguments(argv: Sequence[str], *, prog: str = "txl train") -> TrainArguments:
    """Parse the words of `txl train`, or of a command that takes the same settings. Raises ConfigError."""
    argv = complete_switches(argv)
    if argv and not argv[0].startswith("-"):
        file = argv[0]
    else:
        file = None
    copy = os.environ.pop(CONFIG_COPY, "")  # not for commands that a plugin starts
    if file is not None and not copy:
        check_config_file(file)
    load_plugins(_values_of_flag("--run.plugins", argv))
    if file:
        settings = load_config(file, imports_plugins=True, copy=copy)
    else:
        settings = Config()
    default = TrainArguments(config=Path(file or "CONFIG"), settings=settings)
    flags = [field.name for field in fields(TrainArguments) if field.name not in ("config", "settings")]
    check_typos(argv, [*setting_names(), *flags, "no_dry_run", "no_all", "help"], prog=prog)
    arguments: TrainArguments = parse(TrainArguments, argv, prog=prog, default=default)
    if file is None and arguments.config != default.config:
        raise ConfigError(
            f"the configuration file must come first: txl train {arguments.config} [--section.key value]."
        )
    if file is None and _is_speaker():
        echo("txl train: no configuration file was given, so all settings start from the defaults", to=sys.stderr)
    settings = settle_lanes(arguments.settings, given=flags_in(argv))
    if arguments.init:
        settings = changed(settings, {"run.init": arguments.init})
    return replace(arguments, settings=settings)


def completion(shell: Positional[Shell], /) -> None:
    """Write a shell's completion script to standard output. It completes commands, flags, settings and file names.

    Args:
        shell: bash, zsh or fish. For bash: `txl completion bash > ~/.local/share/bash-completion/completions/txl`. For
            zsh, write a file _txl in a folder of $fpath. For fish, write ~/.config/fish/completions/txl.fish.
    """
    listed = list_arguments(TrainArguments, default=_DEFAULTS)
    settings = [_with_choices(argument) for argument in listed if _is_setting(argument)]
    commands = [_describe_command(name) for name in COMMANDS]
    echo(completion_script(shell, commands, settings=settings))


def _is_setting(argument: Argument) -> bool:
    """Return True if an argument of `txl train` is a setting, whose flag has a dot."""
    return any("." in name for name in argument.names)


def _describe_command(name: str) -> Command:
    """Return the description of a command that the completion script needs."""
    summary = (COMMANDS[name].__doc__ or "").splitlines()[0].rstrip(".")
    argument_classes: dict[str, Any] = {"plan": PlanArguments, "sweep": SweepArguments}
    if name in ("train", "launch"):
        listed = list_arguments(TrainArguments, default=_DEFAULTS)
        arguments = [argument for argument in listed if not _is_setting(argument)]
    else:
        arguments = list_arguments(argument_classes.get(name, COMMANDS[name]))
    if name == "launch":
        arguments += launcher_arguments()
    takes_settings = name in ("train", "launch", *argument_classes)
    return Command(name, summary, arguments, takes_settings=takes_settings)


def _with_choices(setting: Argument) -> Argument:
    """Add the choices of a setting whose values are names in a table. tyro accepts any text for such a setting."""
    name = setting.names[0].removeprefix("--").replace("-", "_")
    return setting._replace(choices=setting.choices or choices_of(name))


_DEFAULTS = TrainArguments(config=Path("CONFIG"), settings=Config())


def _without_flag(flag: str, words: Sequence[str]) -> list[str]:
    """Return the words without a flag and its one value. The flag is spelt with hyphens."""
    kept: list[str] = []
    before = ""
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if flag not in (before, name):
            kept.append(word)
        before = word.replace("_", "-")
    return kept


def _values_of_flag(flag: str, words: Sequence[str]) -> list[str]:
    """Return the values of a flag before the words are parsed. The flag may be given more than once."""
    values: list[str] = []
    is_open = False
    for word in words:
        name, is_joined, value = word.partition("=")
        if word.startswith("--"):
            is_open = name.replace("_", "-") == flag
            if is_open and is_joined:
                values.append(value)
        elif is_open:
            values.append(word)
    return values


_PATH_FLAGS = {"--out", "--data", "--valid", "--test", "--data.path", "--run.dir"}
_PATH_FLAGS_JOINED = {f"{flag}=" for flag in _PATH_FLAGS}

COMMANDS: dict[str, Callable[..., object]] = {
    "prepare": prepare,
    "train": train,
    "launch": launch,
    "plan": plan,
    "sweep": sweep,
    "evaluate": evaluate,
    "recl": recl,
    "export": export,
    "import": import_,
    "generate": generate,
    "serve": serve,
    "inspect": inspect,
    "verify": verify,
    "doctor": doctor,
    "report": report,
    "compare": compare,
    "completion": completion,
}


_WITH_SETTINGS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "launch": launch,
    "plan": plan,
    "sweep": sweep,
}
"""Commands that parse their words themselves, because settings may come from a file and from flags."""

RANKED = ("train", "evaluate", "recl", "doctor")
"""Commands whose ranks work together and print each message once. Every other command runs alone, in any environment.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code.

    The exit code is 0, the command's own code, or the code of an error. The error's message is printed.
    """
    arguments = without_local_rank(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        echo(_usage())
        return 0
    command, *rest = arguments
    if command in ("--version", "-V", "-v", "version"):
        echo(__version__)
        return 0
    if command not in COMMANDS:
        echo(f"txl: error: {_unknown_command(command)}", to=sys.stderr)
        return 2
    try:
        rest = decode_words(rest)
        if command not in ("launch", "sweep"):  # these pass the words unchanged to other processes
            rest = decode_texts(rest)
        rename_variables()
        _refuse_empty_paths(rest)
        rest = words_in_new_names(rest, command=command)
        if command in _WITH_SETTINGS:
            return _WITH_SETTINGS[command](rest)
        call(COMMANDS[command], rest, prog=f"txl {command}")
    except TxlError as error:
        if command not in RANKED or _should_print(error):
            echo(f"txl {command}: error: {error}", to=sys.stderr)
        return error.exit_code
    return 0


def _unknown_command(word: str) -> str:
    """Return the message for a first word that is not a command."""
    if word.endswith(".toml"):
        return f"{word} is not a command. Did you mean `txl train {word}`?"
    if word.startswith("-"):
        hint = did_you_mean(word, ("--version", "--help")) or " Flags follow the command: txl COMMAND --flag value."
        return f"unknown flag {word}.{hint}"
    return f"unknown command {word!r}.{find_command(word, COMMANDS) or ' `txl --help` lists the commands.'}"


def _refuse_empty_paths(words: Sequence[str]) -> None:
    """Refuse an empty path. An empty path would mean the current folder, and probably comes from an unset shell
    variable."""
    previous = ""
    for word in words:
        if word in _PATH_FLAGS_JOINED:
            raise ConfigError(f"{word} has an empty path. Is a shell variable unset?")
        is_a_path = previous in _PATH_FLAGS or not previous.startswith("--")
        if not word and is_a_path:
            if previous:
                where = f" after {previous}"
            else:
                where = ""
            raise ConfigError(f"the command line has an empty path{where}. Is a shell variable unset?")
        previous = word


def run_and_exit() -> None:
    """Run the command line as the `txl` script does, write all output, and exit with the command's code."""
    # Threads that wait for one another spin for some microseconds, then sleep. With the default of a millisecond, steps
    # took ten times longer on cores that other processes use too (tools/experiments/notebook/log.md). torch reads it
    # when it is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    guard_streams()
    try:
        code = _code_of_main()
        flush_output()
    except LostOutputError as error:
        if _is_speaker():
            lost = f"standard output cannot be written: {error.strerror}"
            echo(
                f"txl: error: {lost}. Redirect standard output to another place. Files that the command wrote are "
                "not affected",
                to=sys.stderr,
            )
        drop_output()
        code = 2
    except BrokenPipeError:  # the reader of our output is gone: no message can reach it
        os._exit(141)
    if "torch" in sys.modules:
        # Everything is written, and no rank waits for another. In about one of a hundred exits, native threads of gloo
        # abort the interpreter during its shutdown, and the launcher would report a finished run as failed. So exit
        # without the shutdown.
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


def _code_of_main() -> int:
    """Run the command line and return its exit code. An interruption or a missing package prints one line, and a defect
    prints its traceback.

    Raises LostOutputError or BrokenPipeError if standard output cannot be written.
    """
    try:
        return main()
    except KeyboardInterrupt:
        if _is_speaker():
            if sys.argv[1:2] == ["prepare"]:
                hint = ". The same command continues from the finished parts"
            else:
                hint = ""
            echo(f"txl: interrupted{hint}", to=sys.stderr)
        return 130
    except (LostOutputError, BrokenPipeError):
        raise
    except SystemExit as stop:
        return int(stop.code or 0)
    except ModuleNotFoundError as error:
        if _is_speaker():
            echo(f"txl: error: {missing_package(error)}", to=sys.stderr)
        return 2
    except Exception:  # noqa: BLE001  a defect of this package: print its traceback, then exit as usual
        traceback.print_exc()
        return 1


def _should_print(error: TxlError) -> bool:
    """Return True if this process prints the error. A job prints each error once.

    The rank that raised the error prints it. Before the ranks have joined, one process per node prints it. An error
    without a message means that another rank prints the error.
    """
    if not str(error):
        return False
    if error.rank is None:
        return _is_speaker()
    return os.environ.get("RANK", "0") == str(error.rank)


def _is_speaker() -> bool:
    """Return True if this process prints messages before the ranks have joined. The first process of each node prints
    these messages."""
    if os.environ.get("WORLD_SIZE", "1") == "1":  # the other variables are left over from another job
        return True
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _usage() -> str:
    """Return the list of commands, wrapped to the width of the terminal."""
    head = "usage: txl COMMAND ...   (also: python -m txl_dist COMMAND; deepspeed --module txl_dist train CONFIG)"
    width = shutil.get_terminal_size((160, 24)).columns  # wide into a pipe
    lines = [*textwrap.wrap(head, width), ""]
    for name, function in COMMANDS.items():
        summary = (function.__doc__ or "").splitlines()[0]
        lines += textwrap.wrap(f"  {name:<10} {summary}", width, subsequent_indent=" " * 13)
    return "\n".join([*lines, "", "txl COMMAND --help explains the flags of a command."])
