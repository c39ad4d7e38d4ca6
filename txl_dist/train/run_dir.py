"""The run directory: whose it is, and whether this configuration may continue it.

runs/NAME/  config.toml  metrics.jsonl  log.txt  tensorboard/  checkpoints/  DONE
"""

from __future__ import annotations

from pathlib import Path

from txl_dist.config import Config, config_changes, config_to_toml, load_config
from txl_dist.errors import ConfigError
from txl_dist.files import replace_file
from txl_dist.log import logger


def open_run_dir(run_dir: Path, config: Config) -> None:
    """Make the directory, or continue one, and write the resolved configuration into it. Rank 0 only.

    Raises ConfigError if another configuration made it (with the differences) or if it cannot be written.
    """
    path = run_dir / "config.toml"
    if path.is_file():
        _check_changes(path, config)
    elif run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(f"{run_dir} is not empty and is no run directory. Choose another --run.dir.")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(path, config_to_toml(config).encode())
        (run_dir / "DONE").unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write the run directory {run_dir}: {error.strerror}. "
            "Mend its permissions or choose another --run.dir."
        ) from error


def _check_changes(path: Path, config: Config) -> None:
    changes = config_changes(load_config(path), config)
    frozen = [f"  {change.key}: {change.old} -> {change.new}" for change in changes if change.policy == "frozen"]
    if frozen:
        raise ConfigError(
            f"{path.parent} was made by another configuration:\n" + "\n".join(frozen) + "\n"
            "Restore these settings to continue it, or choose another --run.dir."
        )
    for change in changes:
        if change.policy == "warned":
            logger.warning("resume: %s changed from %s to %s", change.key, change.old, change.new)
