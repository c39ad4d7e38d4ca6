"""Record of the settings and inputs that a corpus was made from. It lets `txl prepare` refuse other inputs before any
work.

A finished corpus has a file prepared.json with three hashes: of its index, of the settings that change its content, and
of its inputs. A command with the same settings and inputs is accepted: it makes the same corpus again, or repairs a
damaged corpus. Inputs are compared by the sizes of their files, and by the first and last 64 KiB of each local file, in
order. The paths and times of the files are not compared.

Limitations: a change in the middle of a file that does not change its size is noticed only at the end. If the corpus
has no prepared.json, because an older version made it, any difference is noticed only at the end.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from txl_dist.data.format import INDEX_NAME, PREPARED_NAME
from txl_dist.data.prepare.detection import has_scheme
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.data.prepare.sources import SourceFile
from txl_dist.data.prepare.workdir import another_corpus
from txl_dist.errors import DataError, translate_errors
from txl_dist.io.files import canonical_hash, open_regular, read_json, sha256_of_file, write_hashed_json

_END_BYTES = 1 << 16


class RequestHashes(NamedTuple):
    """Hashes of the settings and inputs of a preparation, which prepared.json contains."""

    settings: str
    """Hash of all settings that change the corpus, except the inputs."""
    inputs: str
    """Hash of the inputs. Empty if they can be read only once."""


def request_of(settings: PrepareSettings, files: Sequence[SourceFile]) -> RequestHashes:
    """Return the hashes of the settings and of the inputs.

    The hash of the inputs includes the size, the first 64 KiB and the last 64 KiB of each local file. For a named
    corpus it includes only the name. Raises DataError if a file cannot be read.
    """
    if any(file.is_stream for file in files):
        return RequestHashes(settings.content_hash(), "")
    state = hashlib.sha256((settings.name or "").encode())
    for file in files:
        state.update(repr((file.split, file.form, file.size, _ends(file))).encode())
    return RequestHashes(settings.content_hash(), state.hexdigest())


def check_request(request: RequestHashes, target: Path) -> None:
    """Raise DataError if the corpus in `target` was prepared from other inputs or settings.

    Also raises DataError if the index of that corpus cannot be read, because no new corpus could be compared with it.
    """
    if not os.path.exists(target / INDEX_NAME):  # os.path does not raise for a name that is too long
        return
    remedy = "Choose another output folder, or replace the corpus with `--overwrite`."
    with translate_errors(DataError, f"the corpus in {target} is damaged", remedy, of=(OSError, ValueError)):
        index = read_json(target / INDEX_NAME)
        if not isinstance(index, dict) or canonical_hash(index) != index.get("self_sha256"):
            raise ValueError(f"the content of {INDEX_NAME} does not match the hash that the file itself contains")
    if "documents_read" not in index.get("statistics", {}):
        raise another_corpus(target, "it was made of tars by --reindex")
    if not request.inputs:
        raise another_corpus(
            target, "the inputs can be read only once, and so cannot be compared with that corpus in advance"
        )
    earlier = read_request(target)
    if earlier is None:
        return
    if earlier.inputs != request.inputs:
        raise another_corpus(target, "it was prepared from other inputs")
    if earlier.settings != request.settings:
        raise another_corpus(target, "it was prepared with other settings")


def read_request(folder: Path) -> RequestHashes | None:
    """Read the hashes of the settings and inputs that the corpus in a folder was prepared from.

    Returns None if prepared.json is absent or damaged, or does not belong to the corpus's index.
    """
    try:
        record = read_json(folder / PREPARED_NAME)
        if record["index_sha256"] != sha256_of_file(folder / INDEX_NAME):
            return None
        return RequestHashes(str(record["settings"]), str(record["inputs"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_request(folder: Path, request: RequestHashes) -> None:
    """Write prepared.json, which contains the hashes and the hash of the index, next to the index of the corpus."""
    write_hashed_json(
        folder / PREPARED_NAME, {"index_sha256": sha256_of_file(folder / INDEX_NAME), **request._asdict()}
    )


def _ends(file: SourceFile) -> str:
    """Return a hash of the first and last 64 KiB of a local file. For a URL, return the `identity` of the file."""
    if has_scheme(file.path):
        return file.identity
    unreadable = translate_errors(DataError, f"cannot read {file.path}", "Repair or remove the file.")
    with unreadable, open_regular(Path(file.path)) as stream:
        digest = hashlib.sha256(stream.read(_END_BYTES))
        stream.seek(max(0, (file.size or 0) - _END_BYTES))
        digest.update(stream.read(_END_BYTES))
    return digest.hexdigest()
