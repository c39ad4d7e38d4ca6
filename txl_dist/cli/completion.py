"""Shell completion: a static script for each shell. It does not run Python when TAB is pressed.

The script contains all commands, flags and settings (`--section.key`), the choices of flags and settings, and the
places where a file name is expected. It is generated from the commands' arguments, so it must be written again after an
update of the package. The script offers settings with underscores, as in configuration files. It also accepts settings
that are typed with hyphens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from txl_dist import __version__
from txl_dist.cli.tyro_events import Argument

Shell = Literal["bash", "zsh", "fish"]


class Command(NamedTuple):
    """Description of a command for a completion script."""

    name: str
    summary: str
    arguments: Sequence[Argument]
    """Flags and positional arguments of the command, without the settings."""
    takes_settings: bool
    """True if the command also takes settings (--section.key VALUE)."""


def completion_script(shell: Shell, commands: Sequence[Command], *, settings: Sequence[Argument]) -> str:
    """Return the completion script for a shell, as text.

    `settings` describes the settings of `txl train`, which the script offers for all commands that take settings.
    """
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]
    return "\n".join(write(commands, settings)) + "\n"


def _flags(arguments: Sequence[Argument]) -> list[Argument]:
    return [argument for argument in arguments if argument.names]


def _spelling(name: str) -> str:
    """Return a flag as the shell offers it. A setting is spelt with underscores."""
    if "." in name:
        return name.replace("-", "_").replace("__", "--", 1)
    return name


def _values(argument: Argument) -> str:
    """Return the values that complete a flag: its choices, `@file` for a file name, or an empty text."""
    if argument.choices:
        return " ".join(argument.choices)
    if argument.metavar.startswith("{") and argument.metavar.endswith("}"):  # a plugin may add to these
        return argument.metavar.strip("{}").replace(",", " ")
    if argument.takes != "nothing" and argument.value_kind == "text":
        return "@file"
    return ""


def _first_sentence(text: str) -> str:
    """Return the beginning of a help text, short enough for a list of flags."""
    sentence = text.partition(". ")[0].rstrip(".")
    if len(sentence) <= 70:
        return sentence
    return sentence[:67].rsplit(" ", 1)[0] + " ..."


_BASH_HEAD = """\
# bash completion for txl {version}, written by `txl completion bash`. Write it again after an update.
_txl_complete_words() {{
    local word
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <(compgen -W "$1" -- "$current")
}}

_txl_complete_files() {{
    local word
    compopt -o filenames 2>/dev/null
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <(compgen -f -- "$current")
}}

_txl() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} flag= flags= values= at first=1 is_configured=
    if ((COMP_CWORD == 1)); then
        _txl_complete_words "{commands} help version --help --version"
        return
    fi
    if [[ $command == help ]]; then
        _txl_complete_words "{commands}"
        return
    fi
    # bash splits --flag=value into three words.
    [[ $current == "=" ]] && current=
    for ((at = COMP_CWORD - 1; at > 1; at--)); do
        if [[ ${{COMP_WORDS[at]}} == --* ]]; then
            flag=${{COMP_WORDS[at]//_/-}}
            break
        elif [[ ${{COMP_WORDS[at]}} != "=" ]]; then
            first=
        fi
    done
"""
_BASH_TAIL = """\
    # A list takes any number of values, other flags take one.
    if [[ $current == -* ]]; then
        _txl_complete_words "$flags"
    elif [[ $flag && ($first || $takes == many) && $takes != nothing ]]; then
        case $values in
            @file) _txl_complete_files ;;
            *) _txl_complete_words "$values" ;;
        esac
    else
        case $positional in
            @file) _txl_complete_files ;;
            *) _txl_complete_words "$positional" ;;
        esac
    fi
}

complete -F _txl txl
"""


def _bash(commands: Sequence[Command], settings: Sequence[Argument]) -> Iterator[str]:
    yield _BASH_HEAD.format(version=__version__, commands=" ".join(command.name for command in commands))
    yield "    local takes=nothing positional="
    yield "    case $command in"
    for command in commands:
        positional = [argument for argument in command.arguments if not argument.names]
        names = [_spelling(name) for argument in _flags(command.arguments) for name in argument.names]
        yield f"        {command.name})"
        yield f'            flags="{" ".join([*names, "--help"])}"'
        yield f'            positional="{_values(positional[0]) if positional else ""}"'
        yield "            case $flag in"
        yield from _bash_cases(_flags(command.arguments))
        yield "            esac"
        if command.takes_settings:
            yield "            is_configured=1"
        yield "            ;;"
    yield "    esac"
    yield "    if [[ $is_configured ]]; then"
    yield f'        flags+=" {" ".join(_spelling(argument.names[0]) for argument in settings)}"'
    yield "        case $flag in"
    yield from _bash_cases(settings)
    yield "        esac"
    yield "    fi"
    yield _BASH_TAIL


def _bash_cases(flags: Sequence[Argument]) -> Iterator[str]:
    """Yield the branches of a `case` statement in bash that looks up a flag. A branch sets the variables `takes`
    (number of values after the flag) and `values` (completions of a value). Flags with the same two values share a
    branch."""
    alike: dict[tuple[str, str], list[str]] = {}
    for argument in flags:
        names = alike.setdefault((argument.takes, _values(argument)), [])
        names += [name.replace("_", "-") for name in argument.names]
    for (takes, values), names in alike.items():
        yield f'                {" | ".join(names)}) takes={takes} values="{values}" ;;'


_ZSH_HEAD = """\
#compdef txl
# zsh completion for txl {version}, written by `txl completion zsh`. Write it again after an update.
_txl() {{
    local -a commands settings
    local context state state_descr line
    typeset -A opt_args
    commands=(
{commands}
    )
"""
_ZSH_TAIL = """\
    if ((CURRENT == 2)); then
        _describe -t commands command commands
        _arguments '--help[explain the commands]' '--version[print the version]'
        return
    fi
    local command=$words[2]
    shift words
    ((CURRENT--))
    case $command in
        help)
            _describe -t commands command commands
            ;;
"""


def _zsh(commands: Sequence[Command], settings: Sequence[Argument]) -> Iterator[str]:
    listed = [f"        {_zsh_quoted(f'{command.name}:{_zsh_escaped(command.summary)}')}" for command in commands]
    yield _ZSH_HEAD.format(version=__version__, commands="\n".join(listed))
    yield "    settings=("
    for argument in settings:
        yield from (f"        {spec}" for spec in _zsh_specs(argument))
    yield "    )"
    yield _ZSH_TAIL.rstrip("\n")
    for command in commands:
        yield f"        {command.name})"
        yield "            _arguments \\"
        for argument in command.arguments:
            yield from (f"                {spec} \\" for spec in _zsh_specs(argument))
        if command.takes_settings:
            yield "                $settings \\"
        yield "                '--help[explain the flags]'"
        yield "            ;;"
    yield "    esac"
    yield "}"
    yield ""
    yield "# Read by `autoload`, or sourced after `compinit`."
    yield "if [[ $funcstack[1] == _txl ]]; then"
    yield '    _txl "$@"'
    yield "else"
    yield "    compdef _txl txl"
    yield "fi"


def _zsh_specs(argument: Argument) -> Iterator[str]:
    """Yield specifications of `_arguments`, one for each spelling of a flag."""
    values = _values(argument)
    if values == "@file":
        action = "_files"
    elif values:
        action = f"({values})"
    else:
        action = " "
    meaning = _zsh_escaped(_first_sentence(argument.help))
    if not argument.names:
        if argument.takes == "many":
            many = "*"
        else:
            many = ""
        yield _zsh_quoted(f"{many}:{meaning}:{action}")
    for name in argument.names:
        if argument.takes == "nothing":
            value = ""
        else:
            value = f":value:{action}"
        # A list takes one value here: a pattern for its end would hide the flags after it.
        if argument.takes == "many":
            repeats = "*"
        else:
            repeats = ""
        yield _zsh_quoted(f"{repeats}{_spelling(name)}[{meaning}]{value}")


def _zsh_escaped(text: str) -> str:
    """Escape the characters of a text that would end a description in `_arguments`."""
    for mark in ("\\", "[", "]", ":"):
        text = text.replace(mark, f"\\{mark}")
    return text


def _zsh_quoted(text: str) -> str:
    quoted = text.replace("'", "'\\''")
    return f"'{quoted}'"


_FISH_HEAD = """\
# fish completion for txl {version}, written by `txl completion fish`. Write it again after an update.
function __txl_is
    set -l given (commandline -opc)
    test (count $given) -gt 1; and contains -- $given[2] $argv
end

function __txl_first
    test (count (commandline -opc)) -eq 1
end

complete -c txl -f
complete -c txl -n __txl_first -l help -d 'explain the commands'
complete -c txl -n __txl_first -l version -d 'print the version'
complete -c txl -n '__txl_is help' -a '{commands}'
"""


def _fish(commands: Sequence[Command], settings: Sequence[Argument]) -> Iterator[str]:
    yield _FISH_HEAD.format(version=__version__, commands=" ".join(command.name for command in commands))
    for command in commands:
        yield f"complete -c txl -n __txl_first -a {command.name} -d {_fish_quoted(command.summary)}"
    for command in commands:
        of_command = _fish_quoted(f"__txl_is {command.name}")
        for argument in command.arguments:
            yield from _fish_lines(argument, condition=of_command)
        yield f"complete -c txl -n {of_command} -l help -d 'explain the flags'"
    configured = " ".join(command.name for command in commands if command.takes_settings)
    for argument in settings:
        yield from _fish_lines(argument, condition=_fish_quoted(f"__txl_is {configured}"))


def _fish_lines(argument: Argument, *, condition: str) -> Iterator[str]:
    """Yield one `complete` command for each spelling of a flag, or for a positional argument."""
    values = _values(argument)
    meaning = _fish_quoted(_first_sentence(argument.help))
    if not argument.names:
        if values == "@file":
            what = "-F"
        else:
            what = f"-a {_fish_quoted(values)}"
        yield f"complete -c txl -n {condition} {what}"
    for name in argument.names:
        if values == "@file":
            takes = "-r -F"
        elif values:
            takes = f"-x -a {_fish_quoted(values)}"
        else:
            takes = "-x"
        if argument.takes == "nothing":
            takes = ""
        else:
            takes = f" {takes}"
        yield f"complete -c txl -n {condition} -l {_spelling(name).removeprefix('--')} -d {meaning}{takes}"


def _fish_quoted(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"
