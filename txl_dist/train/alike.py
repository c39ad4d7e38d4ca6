"""What all ranks of a run must have in common, checked before they do anything together: settings and plugins.

Ranks with other settings would wait for each other forever, or train another model than rank 0 says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from txl_dist.config.load import Config, flat
from txl_dist.config.registry import Plugin, loaded_plugins
from txl_dist.console.formatting import counted
from txl_dist.distributed.collectives import gather_objects
from txl_dist.distributed.rank_environment import format_ranks
from txl_dist.errors import ConfigError, raised_everywhere

_OF_A_NODE = frozenset(
    {
        "run.dir",
        "run.init",
        "run.plugins",
        "data.path",
        "data.more_paths",
        "data.prefetch_depth",
        "data.cache_dir",
        "data.cache_gib",
        "engine.num_threads",
        "eval.sets",
    }
)
"""Settings that may differ between nodes: paths, and the use of a node's processors and disks."""


_MOST_NAMED = 3
"""Number of settings that a message names. Others are counted."""


def check_ranks_alike(config: Config) -> None:
    """Check that all ranks have the same settings, and the same plugins in the same versions.

    All ranks call it together. Raises ConfigError on all ranks.
    """
    settings = {key: value for key, value in flat(config) if key not in _OF_A_NODE}
    content = json.dumps(settings, sort_keys=True)
    gathered = gather_objects((loaded_plugins(), hashlib.sha256(content.encode()).hexdigest()))
    first_plugins, first_hash = gathered[0]
    for rank, (plugins, _) in enumerate(gathered):
        if plugins != first_plugins:
            raise raised_everywhere(
                ConfigError(
                    f"plugins differ between ranks: rank 0 has {_describe_plugins(first_plugins)}, but rank {rank} has "
                    f"{_describe_plugins(plugins)}. Install the same version on every node."
                )
            )
    others = [rank for rank, (_, other_hash) in enumerate(gathered) if other_hash != first_hash]
    if others:
        by_rank = gather_objects(settings)
        differences = _describe_differences(by_rank[0], by_rank[others[0]], rank=others[0])
        raise raised_everywhere(
            ConfigError(
                f"settings differ between ranks: {differences}. Rank 0 has other settings than {format_ranks(others)}. "
                "Start all nodes with the same configuration file and options."
            )
        )


def _describe_differences(first: dict[str, Any], other: dict[str, Any], *, rank: int) -> str:
    """Return the settings of a rank that differ from those of rank 0, with both values, as text."""
    keys = [key for key in first if other[key] != first[key]]
    named = [f"{key} is {first[key]!r} on rank 0, but {other[key]!r} on rank {rank}" for key in keys[:_MOST_NAMED]]
    if len(keys) > _MOST_NAMED:
        named.append(f"and {counted(len(keys) - _MOST_NAMED, 'further setting')}")
    return "; ".join(named)


def _describe_plugins(plugins: Iterable[Plugin]) -> str:
    """Return names, versions and hashes of plugins as text, or "none" if there are no plugins."""
    described = [f"{plugin.name} {plugin.version} ({plugin.sha256[:12]})".replace("  ", " ") for plugin in plugins]
    return ", ".join(described) or "none"
