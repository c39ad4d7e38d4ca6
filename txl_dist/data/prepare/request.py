"""Record of the settings and inputs of a corpus, so that a different command is refused before it does any work.

A finished corpus has a file prepared.json with three hashes: of its index, of the settings that change its content, and
of its inputs. A command with the same settings and inputs continues: it makes the same corpus, or repairs a damaged
one. Inputs are compared by the sizes and both ends of their files, in order, not by their paths or times.

Limitations: a file that was changed only in its middle, with the same size, is noticed only at the end. The same
holds for any difference from a corpus of a version that wrote no such file.
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
    """Hash of the inputs; empty if they can be read only once."""


def request_of(settings: PrepareSettings, files: Sequence[SourceFile]) -> RequestHashes:
    """Hash the settings and both ends of each file; of a named corpus only its name. Raises DataError."""
    if any(file.is_stream for file in files):
        return RequestHashes(settings.content_hash(), "")
    state = hashlib.sha256((settings.name or "").encode())
    for file in files:
        state.update(repr((file.split, file.form, file.size, _ends(file))).encode())
    return RequestHashes(settings.content_hash(), state.hexdigest())


def check_request(request: RequestHashes, target: Path) -> None:
    """Raise DataError if the corpus in `target` was prepared from other inputs or settings.

    Raises DataError also if its index cannot be read, because no new corpus could be compared with it.
    """
    if not os.path.exists(target / INDEX_NAME):  # os.path does not raise for a name that is too long
        return
    remedy = "Choose another output folder, or replace it with `--overwrite`."
    with translate_errors(DataError, f"the corpus in {target} is damaged", remedy, of=(OSError, ValueError)):
        index = read_json(target / INDEX_NAME)
        if not isinstance(index, dict) or canonical_hash(index) != index.get("self_sha256"):
            raise ValueError(f"{INDEX_NAME} differs from what was written")
    if "documents_read" not in index.get("statistics", {}):
        raise another_corpus(target, "made of tars by --reindex")
    if not request.inputs:
        raise another_corpus(target, "inputs that can be read only once are not comparable before they are read")
    earlier = read_request(target)
    if earlier is None:
        return
    if earlier.inputs != request.inputs:
        raise another_corpus(target, "of other inputs")
    if earlier.settings != request.settings:
        raise another_corpus(target, "prepared with other settings")


def read_request(folder: Path) -> RequestHashes | None:
    """Read what the corpus in a folder was prepared from; None if it is not recorded, or the record is damaged."""
    try:
        record = read_json(folder / PREPARED_NAME)
        if record["index_sha256"] != sha256_of_file(folder / INDEX_NAME):
            return None
        return RequestHashes(str(record["settings"]), str(record["inputs"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_request(folder: Path, request: RequestHashes) -> None:
    """Write the request next to the index of its corpus."""
    write_hashed_json(
        folder / PREPARED_NAME, {"index_sha256": sha256_of_file(folder / INDEX_NAME), **request._asdict()}
    )


def _ends(file: SourceFile) -> str:
    """Return a hash of the first and last bytes of a local file; for a URL its identity."""
    if has_scheme(file.path):
        return file.identity
    unreadable = translate_errors(DataError, f"cannot read {file.path}", "Repair or remove the file.")
    with unreadable, open_regular(Path(file.path)) as stream:
        digest = hashlib.sha256(stream.read(_END_BYTES))
        stream.seek(max(0, (file.size or 0) - _END_BYTES))
        digest.update(stream.read(_END_BYTES))
    return digest.hexdigest()
