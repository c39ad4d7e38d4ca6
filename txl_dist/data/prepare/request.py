"""Records what a corpus was prepared from, so that a different command is refused before it does any work.

A finished corpus keeps a file prepared.json: the hash of its index, that of the settings that change its content, and
that of its inputs. A command with the same settings and inputs continues: it makes the same corpus, or repairs a
damaged one. Inputs are compared by the sizes and both ends of their files, in order, not by their paths or times.

What it gives up: a file that was changed in its middle alone, without another size, is noticed at the end only; so is
any difference from a corpus of a version that wrote no such file.
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
    """Settings and inputs of a preparation, as hashes."""

    settings: str
    """Hash of all settings that change the content, except the inputs."""
    inputs: str
    """Hash of the inputs; empty where they can be read but once."""


def request_of(settings: PrepareSettings, files: Sequence[SourceFile]) -> RequestHashes:
    """Look at the settings and at both ends of each file. A named corpus is its name. Raises DataError."""
    if any(file.is_stream for file in files):
        return RequestHashes(settings.content_hash(), "")
    state = hashlib.sha256((settings.name or "").encode())
    for file in files:
        state.update(repr((file.split, file.form, file.size, _ends(file))).encode())
    return RequestHashes(settings.content_hash(), state.hexdigest())


def check_request(request: RequestHashes, target: Path) -> None:
    """Refuse to replace a corpus that was prepared from something else. Raises DataError.

    A corpus whose index cannot be read is refused too: nothing that is prepared could equal it.
    """
    if not os.path.exists(target / INDEX_NAME):  # a name that is too long is none
        return
    remedy = "Choose another output folder, or replace it with `--overwrite`."
    with translate_errors(DataError, f"the corpus in {target} is damaged", remedy, of=(OSError, ValueError)):
        index = read_json(target / INDEX_NAME)
        if not isinstance(index, dict) or canonical_hash(index) != index.get("self_sha256"):
            raise ValueError(f"{INDEX_NAME} is not what was written")
    if "documents_read" not in index.get("statistics", {}):
        raise another_corpus(target, "made of tars by --reindex")
    if not request.inputs:
        raise another_corpus(target, "with which what can be read but once cannot be compared before it is read")
    found = read_request(target)
    if found is None:
        return
    if found.inputs != request.inputs:
        raise another_corpus(target, "of other inputs")
    if found.settings != request.settings:
        raise another_corpus(target, "prepared with other settings")


def read_request(folder: Path) -> RequestHashes | None:
    """Read what the corpus in a folder was prepared from; None if it is not recorded, or the record is damaged."""
    try:
        found = read_json(folder / PREPARED_NAME)
        if found["index_sha256"] != sha256_of_file(folder / INDEX_NAME):
            return None
        return RequestHashes(str(found["settings"]), str(found["inputs"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_request(folder: Path, request: RequestHashes) -> None:
    """Write the request next to the index of its corpus."""
    write_hashed_json(
        folder / PREPARED_NAME, {"index_sha256": sha256_of_file(folder / INDEX_NAME), **request._asdict()}
    )


def _ends(file: SourceFile) -> str:
    """Hash of the first and the last bytes of a local file; of a URL what its store says of the version."""
    if has_scheme(file.path):
        return file.identity
    unreadable = translate_errors(DataError, f"cannot read {file.path}", "Repair or remove the file.")
    with unreadable, open_regular(Path(file.path)) as stream:
        digest = hashlib.sha256(stream.read(_END_BYTES))
        stream.seek(max(0, (file.size or 0) - _END_BYTES))
        digest.update(stream.read(_END_BYTES))
    return digest.hexdigest()
