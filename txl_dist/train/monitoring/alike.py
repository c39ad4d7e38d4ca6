"""Checks that all ranks of a run have the same code, settings, plugins and corpora.

Ranks that differ would wait for each other forever, or train another model than rank 0 says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

from txl_dist.config.job_settings import hash_of_job, settings_of_job
from txl_dist.config.registry import Plugin, loaded_plugins
from txl_dist.console.formatting import counted
from txl_dist.data.loader.corpora import Corpora
from txl_dist.distributed.collectives import gather_objects
from txl_dist.distributed.rank_environment import format_ranks
from txl_dist.errors import ConfigError, LostRankError, first_line, raised_everywhere

_MOST_NAMED = 3
"""Number of settings that a message names. Others are counted."""


@contextmanager
def first_exchange() -> Iterator[None]:
    """Return a context manager for what the ranks exchange first, when no watchdog or agent knows all ranks yet.

    Raises LostRankError if another rank was lost or does not answer.
    """
    try:
        yield
    except RuntimeError as error:  # torch's errors of collectives are RuntimeErrors
        raise LostRankError(
            "another rank was lost or did not answer before all ranks had connected to each other "
            f"({first_line(error)}). The same command starts again."
        ) from error


def check_ranks_alike(sections: Mapping[str, Mapping[str, Any]], *, code: str) -> None:
    """Check that all ranks have the same code, the same settings, and the same plugins in the same versions.

    `sections` are all settings as `Config.model_dump(mode="json")` returns them. `code` is the result of `code_version`
    when this process, or its agent, started. All ranks call it together. Raises ConfigError on all ranks.
    """
    problem = code_problem(gather_objects(code))  # first: other code may exchange other values
    if not problem:
        gathered = gather_objects((loaded_plugins(), hash_of_job(sections)))
        problem = plugin_problem([plugins for plugins, _ in gathered])
        if not problem and len({settings_hash for _, settings_hash in gathered}) > 1:
            problem = settings_problem(gather_objects(settings_of_job(sections)))
    if problem:
        raise raised_everywhere(ConfigError(problem))


def check_corpora_alike(corpora: Corpora) -> None:
    """Check that all ranks read corpora and held-out sets of equal content, which may be in other folders.

    All ranks call it together. Raises ConfigError on all ranks.
    """
    splits = [*corpora.train, *corpora.eval.values()]
    problem = corpora_problem(
        gather_objects(
            [SplitIdentity(split.corpus.fingerprint, split.name, split.corpus.storage.location) for split in splits]
        )
    )
    if problem:
        raise raised_everywhere(ConfigError(problem))


class SplitIdentity(NamedTuple):
    """Split of a corpus that a rank reads."""

    fingerprint: str
    """Hash of the corpus."""
    split: str
    """Name of the split."""
    path: str
    """Folder of the corpus on the rank's node. Equal corpora may be in different folders."""


def code_problem(by_rank: Sequence[str]) -> str:
    """Return a message if a rank runs other code than rank 0, or an empty text. The code is described as text."""
    for rank, code in enumerate(by_rank):
        if code != by_rank[0]:
            return (
                f"the code differs between ranks: rank 0 runs {by_rank[0]}, but rank {rank} runs {code}. Install the "
                "same versions on every node."
            )
    return ""


def plugin_problem(by_rank: Sequence[Sequence[Plugin]]) -> str:
    """Return a message if a rank has other plugins than rank 0, or an empty text."""
    for rank, plugins in enumerate(by_rank):
        if plugins != by_rank[0]:
            return (
                f"plugins differ between ranks: rank 0 has {_describe_plugins(by_rank[0])}, but rank {rank} has "
                f"{_describe_plugins(plugins)}. Install the same version on every node."
            )
    return ""


def settings_problem(by_rank: Sequence[dict[str, Any]]) -> str:
    """Return a message if a rank has other settings than rank 0, or an empty text. Settings are by `section.key`."""
    first = by_rank[0]
    others = [rank for rank, settings in enumerate(by_rank) if settings != first]
    if not others:
        return ""
    other = by_rank[others[0]]
    keys = [key for key in first | other if first.get(key) != other.get(key)]  # another version has other keys
    named = []
    for key in keys[:_MOST_NAMED]:
        named.append(f"{key} is {first.get(key)!r} on rank 0, but {other.get(key)!r} on rank {others[0]}")
    if len(keys) > _MOST_NAMED:
        named.append(f"and {counted(len(keys) - _MOST_NAMED, 'further setting')}")
    return (
        f"settings differ between ranks: {'; '.join(named)}. Rank 0 has other settings than {format_ranks(others)}. "
        "Start all nodes with the same configuration file and options."
    )


def corpora_problem(by_rank: Sequence[Sequence[SplitIdentity]]) -> str:
    """Return a message if a rank reads other corpora than rank 0, or an empty text."""
    for rank, splits in enumerate(by_rank):
        for first, other in zip_longest(by_rank[0], splits, fillvalue=SplitIdentity("", "", "")):
            if first[:2] != other[:2]:
                return (
                    f"corpora differ between ranks: rank 0 reads {_describe_split(first)}, but rank {rank} reads "
                    f"{_describe_split(other)}. Give every node the same corpora, in a shared folder or as copies."
                )
    return ""


def _describe_split(name: SplitIdentity) -> str:
    """Return the split of a corpus as text."""
    if not name.split:
        return "no corpus in its place"
    return f"the split {name.split} of {name.path} (fingerprint {name.fingerprint[:12]})"


def _describe_plugins(plugins: Iterable[Plugin]) -> str:
    """Return names, versions and hashes of plugins as text, or "none" if there are no plugins."""
    described = [f"{plugin.name} {plugin.version} ({plugin.sha256[:12]})".replace("  ", " ") for plugin in plugins]
    return ", ".join(described) or "none"
