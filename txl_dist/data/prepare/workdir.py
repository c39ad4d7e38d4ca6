"""Work folder of `txl prepare`, next to the output folder. It survives a kill, so that the same command can continue.

    .NAME.prepare/
      lock  owner         lock of the process that prepares the corpus, and a description of this process
      job.json            hash of the settings that all other files in this folder depend on
      tokenizer.json      trained or copied tokenizer; complete once the file tokenizer-inputs exists
      named/              downloads
      part-*  shard-*     see tokenize.py and merge.py
      near-*              see near_duplicates.py
      corpus/             the new corpus, which is moved to the output folder
      replaced/           the corpus that was in the output folder, while it is replaced

The same command continues from this folder. A command with other settings discards the content of the folder. A
successful preparation removes the folder. The file job.json is removed first, so that no process continues from a
half-removed folder.
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
    """Lock the work folder of the output folder `target`, and yield the path of the work folder.

    `stamp` is the hash of the settings. The work of an earlier process is discarded if its stamp differs or
    `can_continue` is False. After an error, the folder is kept if it contains finished work that the same command can
    reuse. If an earlier process was killed while it replaced a corpus, the old corpus is moved back. Raises DataError
    if another process has locked the folder, or if the folder cannot be written.
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
                    logger.warning("finished work is kept in %s: the same command continues from it", scratch)
    except Timeout:
        raise DataError(
            f"{target} is being prepared by {_owner(scratch)}. Wait for that process, or choose another output folder."
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "Free some disk space or choose"
        else:
            remedy = "Choose"
        raise DataError(
            f"cannot write {target}: {why_unwritable(target, error)}. {remedy} another output folder."
        ) from error


def _make_own(scratch: Path) -> None:
    """Create the work folder, and remove symbolic links in it, because writing through a link would change other
    files."""
    if scratch.is_symlink():
        scratch.unlink()
    scratch.mkdir(parents=True, exist_ok=True)
    for path in scratch.iterdir():
        if path.is_symlink():
            path.unlink()


def _put_back(scratch: Path, target: Path) -> None:
    """Finish the replacement of a corpus: remove the old corpus, or move it back if there is no new corpus."""
    replaced = scratch / _REPLACED
    if os.path.exists(replaced) and os.path.exists(target):
        shutil.rmtree(replaced, ignore_errors=True)
    elif os.path.exists(replaced):
        replaced.rename(target)


def _holds_finished_work(scratch: Path) -> bool:
    """Return whether the folder contains work that the same command can reuse: a part, a tokenizer, a download or a
    shard."""
    for pattern in ("part-*.json", TOKENIZER_DONE, f"{DOWNLOADS}/*", f"{CORPUS}/*.idx"):
        if any(path.suffix != ".part" for path in scratch.glob(pattern)):
            return True
    return False


def _take_over(scratch: Path, *, stamp: str, can_continue: bool) -> None:
    """Keep the work of an earlier process with the same stamp, if it can be continued. Otherwise discard it with a
    warning."""
    try:
        earlier_stamp = read_json(scratch / _JOB)["stamp"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        earlier_stamp = None
    if earlier_stamp == stamp and can_continue:
        return
    if earlier_stamp is not None:
        if can_continue:
            reason = "it had other settings"
        else:
            reason = "stdin, commands and URLs without a version can have changed"
        logger.warning("%s: an interrupted preparation is discarded, because %s. Starting again.", scratch, reason)
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
    """Raise DataError if a finished corpus could not be moved to `target`. This function is called before any work.

    A folder is overwritten only if it contains a corpus.
    """
    # os.path.exists returns False for a name that is too long, where pathlib raises.
    if os.path.exists(target) and not target.is_dir():
        raise DataError(f"{target} is a file. Choose another output folder.")
    if os.path.ismount(target):
        raise DataError(f"{target} is a mount point, which cannot be replaced. Choose a folder below it.")
    if Path.cwd().is_relative_to(target):
        raise DataError(f"{target} is the current folder, which would be replaced. Choose a folder below it.")
    is_empty = not os.path.exists(target) or not any(target.iterdir())
    if not is_empty and not os.path.exists(target / INDEX_NAME):
        raise DataError(f"{target} contains other files but no corpus. Choose another output folder.")


def another_corpus(target: Path, difference: str = "") -> DataError:
    """Return the error for a different corpus in the output folder. `difference` says what differs."""
    if difference:
        more = f" ({difference})"
    else:
        more = ""
    return DataError(
        f"another corpus is in {target}{more}. Choose another output folder, or replace the corpus with `--overwrite`."
    )


def move_into_place(written: Path, target: Path, *, overwrite: bool) -> bool:
    """Move the folder `written` to `target`. Returns False after the move. If `target` already contains the same corpus
    without damage, nothing is moved and True is returned.

    Raises DataError if `target` contains another corpus and `overwrite` is not set.
    """
    if os.path.exists(target / INDEX_NAME):
        is_same = read_bytes(target / INDEX_NAME) == read_bytes(written / INDEX_NAME)
        if is_same and not verify_corpus(target):
            return True
        # A damaged corpus is repaired by preparing it again, so it is replaced without --overwrite.
        if not is_same and not overwrite:
            raise another_corpus(target)
        target.rename(written.with_name(_REPLACED))
    written.rename(target)  # this replaces an empty folder
    flush_folder(target.parent)
    return False
