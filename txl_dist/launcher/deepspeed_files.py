"""Files that the `deepspeed` launcher reads by itself, in a form that it reads right.

It takes a byte order mark, as editors and shells of Windows write it, for the first character of a machine's or a
variable's name. So a file with a mark is given to the launcher as a copy without it. The copies last as long as the
run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from txl_dist.errors import ConfigError, translate_errors
from txl_dist.io.files import decode_text, has_mark, read_bytes

ENVIRONMENT_FILE = "DS_ENV_FILE"
"""Variable that names the file of variables for other machines."""


class LauncherFiles(NamedTuple):
    """Flags and variables that make the launcher read the copies; empty where it reads the files themselves."""

    flags: list[str]
    environment: dict[str, str]


@contextmanager
def files_for_launcher(hostfile: Path) -> Iterator[LauncherFiles]:
    """Copy the hostfile and the files of variables where they have a mark. Raises ConfigError for what is no text."""
    with tempfile.TemporaryDirectory(prefix="txl-launch-") as folder:
        flags, environment = [], {}
        hosts = _text_without_mark([hostfile])
        if hosts is not None:
            copy = Path(folder, "hostfile")
            copy.write_text(hosts, encoding="utf-8")
            flags = ["--hostfile", str(copy)]
        variables = _text_without_mark(environment_files())
        if variables is not None:
            copy = Path(folder, "environment")
            copy.write_text(variables, encoding="utf-8")
            environment = {ENVIRONMENT_FILE: str(copy)}
        yield LauncherFiles(flags, environment)


def environment_files() -> list[Path]:
    """The files of variables for other machines, in the order in which the launcher reads them."""
    name = os.environ.get(ENVIRONMENT_FILE, ".deepspeed_env")
    files = dict.fromkeys([Path.home() / name, Path.cwd() / name])
    return [path for path in files if path.is_file()]


def _text_without_mark(files: list[Path]) -> str | None:
    """The files as one text; None where none of them has a mark."""
    texts, is_marked = [], False
    for path in files:
        with translate_errors(
            ConfigError, f"cannot read {path}", "Save it as UTF-8.", of=(OSError, UnicodeDecodeError)
        ):
            content = read_bytes(path)
            is_marked |= has_mark(content)
            texts.append(decode_text(content).removesuffix("\n") + "\n")
    return "".join(texts) if is_marked else None
