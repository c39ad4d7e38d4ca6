"""Tables that a plugin can extend, and the plugins that this process has loaded.

A table (`schema.OPTIMIZERS`, for instance) is a dictionary of rows by name. Settings, checkpoints and exports look
names up in it. A plugin is a module that adds rows when it is imported, by the functions of `txl_dist.plugins`.

A module that a file names is imported only if the caller says that the user has agreed to it. A checkpoint or a bundle
only lists the plugins that it needs. The checkpoint or bundle is refused until all these plugins are loaded.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from txl_dist.errors import ConfigError, TxlError, in_one_line

Row = TypeVar("Row")


class Plugin(NamedTuple):
    """Identity of a plugin, as a checkpoint or a bundle records it."""

    name: str
    """Name of the plugin's module, as in `run.plugins`."""
    version: str
    """Version of the plugin's distribution, or its `__version__`. It is empty if the plugin has none."""
    sha256: str
    """Hash of the Python files of the plugin's top-level package, or of its one file."""


class OneOf:
    """Annotation of a setting whose values are the names in a table, including names that plugins added."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table

    def check(self, name: str) -> str:
        """Raise PydanticCustomError if a setting's value is not a name in the table."""
        if name not in self.table:
            raise PydanticCustomError("unknown_name", "it can be {names}", {"names": ", ".join(self.table)})
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))


_loaded: dict[str, Plugin] = {}
"""Plugins that this process has loaded, in the order of loading."""
_added: list[tuple[str, dict[str, Any], str]] = []
"""Rows that plugins have added, each as (name of the plugin, table, name of the row)."""
_loading: list[str] = []
"""Names of the plugins that are being imported now. If a plugin imports another plugin, the imported plugin is last."""


def add_row(table: dict[str, Row], name: str, row: Row, *, what: str) -> None:
    """Add a row to a table. Raises ConfigError if the table has the name already, or if the name is not allowed."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"{what} {name!r:.80}: a name may contain only letters, digits and underscores. Choose another name."
        )
    if name in table:
        owner = _plugin_of(table, name)
        raise ConfigError(
            f"{what} {name!r} exists already{f', from the plugin {owner}' if owner else ''}. Choose another name."
        )
    table[name] = row
    if _loading:
        _added.append((_loading[-1], table, name))


def owner_of(table: Mapping[str, Any], name: str) -> Plugin | None:
    """Return the plugin that added the row `name` to a table, or None if the row is built in."""
    return _loaded.get(_plugin_of(table, name))


def _plugin_of(table: Mapping[str, Any], name: str) -> str:
    return next((plugin for plugin, other, row in _added if other is table and row == name), "")


@contextmanager
def plugin_errors(
    table: Mapping[str, Any], name: str, *, what: str, kind: type[TxlError] = ConfigError
) -> Iterator[None]:
    """Turn an error in a plugin's code into an error of one line. The message names the plugin that added the row
    `name` to the table.

    If the row is built in, an error passes unchanged.
    """
    try:
        yield
    except TxlError:
        raise
    except Exception as error:
        owner = owner_of(table, name)
        if owner is None:
            raise
        raise kind(
            f"the plugin {owner.name}: {what} {name!r} failed: {in_one_line(error)}{_place(error)}. Correct the plugin."
        ) from error


def load_plugins(names: Iterable[str]) -> None:
    """Import the plugins that are not loaded yet. This runs their code, so use it only for names that the user gave.

    Raises ConfigError, in one line, for a module that is missing or raises an error.
    """
    for name in names:
        if name in _loaded:
            continue
        _check_name(name)
        _loading.append(name)
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as error:
            _forget(name)
            raise ConfigError(_why_not(name, error)) from error
        finally:
            _loading.pop()
        _loaded[name] = Plugin(name, _version_of(module), _sha256_of(module))


def loaded_plugins() -> tuple[Plugin, ...]:
    """Return the plugins that this process has loaded, in the order of loading."""
    return tuple(_loaded.values())


def plugins_text() -> str:
    """Return the loaded plugins, each after a comma, with version and hash. The text is empty without plugins."""
    return "".join(f", plugin {plugin.name} {plugin.version} ({plugin.sha256[:12]})" for plugin in _loaded.values())


def require_plugins(recorded: Sequence[Mapping[str, str]], *, where: str) -> list[str]:
    """Return a sentence for each recorded plugin whose code has changed. Raises ConfigError if a recorded plugin is not
    loaded."""
    for plugin in recorded:
        if plugin["name"] not in _loaded:
            raise ConfigError(f"{where} was made with {_shown(plugin)}, which is not loaded. {remedy(plugin['name'])}")
    return plugin_changes(recorded, where=where)


def plugin_changes(recorded: Sequence[Mapping[str, str]], *, where: str) -> list[str]:
    """Return a sentence for each recorded plugin that is not loaded, or whose code has changed."""
    sentences = []
    for plugin in recorded:
        now = _loaded.get(plugin["name"])
        if now is None:
            sentences.append(f"{where} was made with {_shown(plugin)}, which is not loaded now")
        elif now.sha256 != plugin["sha256"]:
            sentences.append(
                f"{where} was made with {_shown(plugin)}, but the code of the plugin has changed since then: now "
                f"{_shown(now._asdict())}"
            )
    return sentences


def remedy(name: str) -> str:
    """Return a sentence that says how to load a plugin."""
    return (
        f"If you trust the plugin's code, install the plugin and give --plugins {name} (for training: --run.plugins "
        f"{name}, or run.plugins in the file)."
    )


def not_loaded(names: Iterable[str]) -> list[str]:
    """Return the names of the plugins that are not loaded in this process."""
    return [name for name in names if name not in _loaded]


def _shown(plugin: Mapping[str, str]) -> str:
    if plugin["version"]:
        version = f" {plugin['version']}"
    else:
        version = ""
    return f"the plugin {plugin['name']}{version} (sha256 {plugin['sha256'][:12]})"


def _check_name(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"run.plugins: {name!r:.200} is not the name of a module. Write the name as Python imports it: "
            f"my_package.my_module."
        )


def _forget(name: str) -> None:
    """Remove from the tables the rows that a plugin added before its import failed."""
    for entry in [entry for entry in _added if entry[0] == name]:
        _, table, row = entry
        del table[row]
        _added.remove(entry)
    sys.modules.pop(name, None)


def _why_not(name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        return (
            f"the plugin {name} is not installed for {sys.executable}: there is no module {error.name}. Install its "
            "package (pip install), or add the folder that contains the plugin to PYTHONPATH."
        )
    if isinstance(error, TxlError):
        reason = str(error).rstrip(".")
    else:
        reason = in_one_line(error)
    return f"the plugin {name} cannot be imported: {reason}{_place(error)}. Correct the plugin, or remove its name."


def _place(error: BaseException) -> str:
    """Return file and line of a plugin's code where an error was raised, in parentheses.

    The result is empty if the error was raised in other code.
    """
    ours = str(Path(__file__).parent)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((ours, "<"))
    ]
    frames = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    if frames:
        return f" ({frames[-1].filename}:{frames[-1].lineno})"
    return ""


def _version_of(module: Any) -> str:
    top = module.__name__.partition(".")[0]
    for distribution in importlib.metadata.packages_distributions().get(top, []):
        return importlib.metadata.version(distribution)
    return str(getattr(module, "__version__", ""))


def _sha256_of(module: Any) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(_files_of(module)):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _files_of(module: Any) -> Iterator[tuple[str, Path]]:
    """Return (name, path) for the Python files that contain a plugin's code."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    folders = [Path(folder) for folder in getattr(top, "__path__", ())]
    for folder in folders:
        for path in folder.rglob("*.py"):
            yield path.relative_to(folder).as_posix(), path
    if not folders and getattr(module, "__file__", None):
        path = Path(module.__file__)
        yield path.name, path
