"""Copies, without byte order marks, of files that the `deepspeed` launcher reads.

Editors and shells of Windows write such a mark, and the launcher reads it as the first character of a machine's or a
variable's name. So it gets a copy without the mark, which exists as long as the run.
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
    """Copy the hostfile and the files of variables where they have a mark. Raises ConfigError for what is not text."""
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
    """Return the files of variables for other machines, in the order in which the launcher reads them."""
    name = os.environ.get(ENVIRONMENT_FILE, ".deepspeed_env")
    files = dict.fromkeys([Path.home() / name, Path.cwd() / name])
    return [path for path in files if path.is_file()]


def _text_without_mark(files: list[Path]) -> str | None:
    """Return the files as one text without marks; None if no file has a mark."""
    texts = []
    is_marked = False
    for path in files:
        with translate_errors(
            ConfigError, f"cannot read {path}", "Save it as UTF-8.", of=(OSError, UnicodeDecodeError)
        ):
            content = read_bytes(path)
            is_marked |= has_mark(content)
            texts.append(decode_text(content).removesuffix("\n") + "\n")
    if is_marked:
        return "".join(texts)
    return None
