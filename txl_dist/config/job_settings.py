"""Choice of the settings that all ranks of a job must have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

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
        "data.retries",
        "data.allow_protocols",
        "engine.num_threads",
        "eval.sets",
        "metrics.tensorboard",
        "metrics.wandb",
        "metrics.wandb_entity",
        "metrics.wandb_name",
        "metrics.wandb_group",
        "metrics.wandb_tags",
        "metrics.wandb_id",
        "metrics.wandb_resume",
    }
)
"""Settings that may differ between the ranks of a job: paths and their storage, the use of a node's processors and
disks, and records that only rank 0 writes."""


def named_values(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the name of every setting, as `section.key`, with its value."""
    for section, values in sections.items():
        for key, value in values.items():
            yield f"{section}.{key}", value


def settings_of_job(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that must be the same on all ranks of a job, by `section.key`.

    `sections` are all settings as `Config.model_dump(mode="json")` returns them.
    """
    return {name: value for name, value in named_values(sections) if name not in _OF_A_NODE}


def hash_of_job(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sha256 hash of `settings_of_job`."""
    return hashlib.sha256(json.dumps(settings_of_job(sections), sort_keys=True).encode()).hexdigest()
