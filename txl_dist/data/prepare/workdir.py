"""The folder beside its target in which `txl prepare` works, and which survives a kill.

    .NAME.prepare/
      lock  owner         held by one process at a time; who holds it
      job.json            hash of the settings that everything else in here depends on
      tokenizer.json      learnt or copied, whole once tokenizer-inputs is there
      named/              what was downloaded
      part-*  shard-*     see encoding.py and assembly.py
      corpus/             becomes the target
      replaced/           the corpus that was there, while its place is taken

The same command goes on with what it finds; other settings discard it. Nothing is left after success. job.json is
the first to go, so that nobody goes on with what is half removed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txl_dist.console.logging import logger
from txl_dist.data.format import INDEX_NAME
from txl_dist.data.verify.verify import verify_corpus
from txl_dist.errors import DataError
from txl_dist.io.files import atomic_replace, flush_folder, read_bytes, read_json, why_unwritable, write_bytes

CORPUS, DOWNLOADS, TOKENIZER_DONE = "corpus", "named", "tokenizer-inputs"
_REPLACED = "replaced"
_JOB, _LOCK, _OWNER = "job.json", "lock", "owner"


@contextmanager
def claim_scratch(target: Path, *, stamp: str, can_continue: bool) -> Iterator[Path]:
    """The scratch folder of a target, locked.

    `stamp` is the hash of the settings. Without `can_continue` what an earlier process left is discarded. After an
    error the folder stays if it holds finished work that can be continued. A corpus that an earlier process had moved
    out of its place, to put another one there, is put back. Raises DataError if another process holds the folder or it
    cannot be written.
    """
    from filelock import FileLock, Timeout

    scratch = target.with_name(f".{target.name}.prepare")
    try:
        _make_own(scratch)
        with FileLock(scratch / _LOCK, timeout=0):
            write_bytes(scratch / _OWNER, f"process {os.getpid()} on {socket.gethostname()}".encode())
            _put_back(scratch, target)
            _take_over(scratch, stamp=stamp, can_continue=can_continue)
            is_done = False
            try:
                yield scratch
                is_done = True
            finally:
                _put_back(scratch, target)
                if is_done or not can_continue or not _holds_finished_work(scratch):
                    (scratch / _JOB).unlink(missing_ok=True)
                    shutil.rmtree(scratch, ignore_errors=True)
                else:
                    logger.warning("finished work is kept in %s: the same command goes on with it", scratch)
    except Timeout:
        raise DataError(
            f"{target} is being prepared by {_owner(scratch)}. Wait for it, or choose another output folder."
        ) from None
    except OSError as error:
        remedy = "Free some space or choose" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Choose"
        raise DataError(
            f"cannot write {target}: {why_unwritable(target, error)}. {remedy} another output folder."
        ) from error


def _make_own(scratch: Path) -> None:
    """The folder, without links, by which others could lead what is written in it elsewhere."""
    if scratch.is_symlink():
        scratch.unlink()
    scratch.mkdir(parents=True, exist_ok=True)
    for path in scratch.iterdir():
        if path.is_symlink():
            path.unlink()


def _put_back(scratch: Path, target: Path) -> None:
    """End the replacement of a corpus: remove the old one, or undo it if the new one did not come."""
    replaced = scratch / _REPLACED
    if os.path.exists(replaced) and os.path.exists(target):
        shutil.rmtree(replaced, ignore_errors=True)
    elif os.path.exists(replaced):
        replaced.rename(target)


def _holds_finished_work(scratch: Path) -> bool:
    """Whether the same command is spared something: a part, a tokenizer, a download."""
    found = (path for pattern in ("part-*.json", TOKENIZER_DONE, f"{DOWNLOADS}/*") for path in scratch.glob(pattern))
    return any(path.suffix != ".part" for path in found)


def _take_over(scratch: Path, *, stamp: str, can_continue: bool) -> None:
    """Discard what does not belong to this job."""
    try:
        found = read_json(scratch / _JOB)["stamp"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        found = None
    if found == stamp and can_continue:
        return
    if found is not None:
        reason = "it had other settings" if can_continue else "stdin, commands and URLs without a version may differ"
        logger.warning("%s: an interrupted preparation is discarded, since %s; beginning anew", scratch, reason)
    (scratch / _JOB).unlink(missing_ok=True)
    for path in scratch.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (_LOCK, _OWNER):
            path.unlink()
    atomic_replace(scratch / _JOB, json.dumps({"stamp": stamp}).encode())


def _owner(scratch: Path) -> str:
    try:
        return read_bytes(scratch / _OWNER, max_bytes=300).decode() or "another process"
    except (OSError, ValueError):
        return "another process"


def check_target(target: Path) -> None:
    """Refuse early what the move at the end could not do. Only a corpus is ever overwritten."""
    if os.path.exists(target) and not target.is_dir():  # false, where pathlib raises, for a name that is too long
        raise DataError(f"{target} is a file. Choose another output folder.")
    if os.path.ismount(target):
        raise DataError(f"{target} is a mount point, which cannot be replaced. Choose a folder below it.")
    if Path.cwd().is_relative_to(target):
        raise DataError(f"{target} is the folder that you are in, which would be replaced. Choose a folder below it.")
    is_empty = not os.path.exists(target) or not any(target.iterdir())
    if not is_empty and not os.path.exists(target / INDEX_NAME):
        raise DataError(f"{target} holds other files and no corpus. Choose another output folder.")


def another_corpus(target: Path, difference: str = "") -> DataError:
    """The error where a corpus of other content would be replaced."""
    more = f" ({difference})" if difference else ""
    return DataError(
        f"another corpus is in {target}{more}. Choose another output folder, or replace it with `--overwrite`."
    )


def move_into_place(written: Path, target: Path, *, overwrite: bool) -> bool:
    """True if an identical, intact corpus is there already."""
    if os.path.exists(target / INDEX_NAME):
        is_same = read_bytes(target / INDEX_NAME) == read_bytes(written / INDEX_NAME)
        if is_same and not verify_corpus(target):
            return True
        # Preparing again is the remedy for a damaged corpus, so that one is replaced without asking.
        if not is_same and not overwrite:
            raise another_corpus(target)
        target.rename(written.with_name(_REPLACED))
    written.rename(target)  # an empty folder in the way is replaced
    flush_folder(target.parent)
    return False
