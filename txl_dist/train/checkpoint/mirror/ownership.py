"""The run that a mirror belongs to, by an id that its first job draws.

RUN.json      in the mirror
MIRROR.json   its copy in the run directory
"""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path

from txl_dist.data.storage.bucket import Bucket, read_if_present
from txl_dist.distributed.processes import process_id
from txl_dist.errors import ConfigError
from txl_dist.io.files import atomic_replace, parse_object, read_bytes

RUN = "RUN.json"
LOCAL_ID = "MIRROR.json"
"""Name of the file in the run directory that has the run's id."""


def read_local_id(run_dir: Path) -> str:
    """Return the run's id in a run directory, or an empty text if there is none."""
    try:
        return str(parse_object(read_bytes(run_dir / LOCAL_ID))["run_id"])
    except (OSError, ValueError, KeyError):
        return ""


def write_local_id(run_dir: Path, run_id: str, *, url: str) -> None:
    """Write the run's id into the run directory. Raises OSError."""
    atomic_replace(run_dir / LOCAL_ID, json.dumps({"run_id": run_id, "mirror": url}).encode() + b"\n")


def read_mirror_id(bucket: Bucket) -> str:
    """Return the id of the run that a mirror belongs to, or an empty text for a new mirror. Raises UnreachableError."""
    content = read_if_present(bucket, RUN)
    if content is None:
        return ""
    try:
        return str(parse_object(content)["run_id"])
    except (ValueError, KeyError):
        return "unknown"


def claim_id(bucket: Bucket, run_id: str) -> str:
    """Make a new mirror the mirror of a run, by `run_id` or a new id. Returns the id.

    Raises UnreachableError. It also raises ConfigError if another run claims the mirror at the same moment.
    """
    run_id = run_id or secrets.token_hex(8)
    facts = {"run_id": run_id, "host": process_id().host, "began": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    if not bucket.create(RUN, json.dumps(facts).encode() + b"\n"):
        raise ConfigError(f"{bucket.location}: another run began to use this mirror. Give another --checkpoint.mirror.")
    return run_id
