"""Copies, without byte order marks, of files that the `deepspeed` launcher reads.

Editors and shells of Windows write such a mark, and the launcher reads it as the first character of a machine's or a
variable's name. So the launcher reads copies without the mark, which exist as long as the run.
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
"""Variable that names the file of environment variables for other machines."""


class LauncherFiles(NamedTuple):
    """Flags and environment variables that make the launcher read the copies of its files.

    Flags and variables are empty if the launcher can read its files without copies.
    """

    flags: list[str]
    """Flags of the launcher, which name the copy of the hostfile."""
    environment: dict[str, str]
    """Environment variables of the launcher, which name the copy of the file of variables."""


@contextmanager
def files_for_launcher(hostfile: Path) -> Iterator[LauncherFiles]:
    """Copy the hostfile and the files of environment variables if they have a byte order mark.

    Yields the flags and variables that name the copies. The copies are removed when the block ends. Raises ConfigError
    if a file is not text.
    """
    with tempfile.TemporaryDirectory(prefix="txl-launch-") as folder:
        flags = []
        environment = {}
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
    """Return the files of environment variables for other machines, in the order in which the launcher reads them."""
    name = os.environ.get(ENVIRONMENT_FILE, ".deepspeed_env")
    files = dict.fromkeys([Path.home() / name, Path.cwd() / name])
    return [path for path in files if path.is_file()]


def _text_without_mark(files: list[Path]) -> str | None:
    """Return the content of the files, joined and without byte order marks, or None if no file has a mark."""
    texts = []
    is_marked = False
    for path in files:
        with translate_errors(
            ConfigError, f"cannot read {path}", "Save the file as UTF-8.", of=(OSError, UnicodeDecodeError)
        ):
            content = read_bytes(path)
            is_marked |= has_mark(content)
            texts.append(decode_text(content).removesuffix("\n") + "\n")
    if is_marked:
        return "".join(texts)
    return None
