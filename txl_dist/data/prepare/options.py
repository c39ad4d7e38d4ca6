"""Settings of `txl prepare`: their checks, and the defaults of named corpora such as enwik8.

This module is light to import, because the command line builds its flags from these settings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from txl_dist import __version__
from txl_dist.config.registry import loaded_plugins
from txl_dist.config.renamed import keywords_in_old_names
from txl_dist.console.formatting import flag_of
from txl_dist.data.prepare.documents import TEST, VALID, Cut, EncodingErrors, Reading
from txl_dist.errors import ConfigError
from txl_dist.tokenizers.learning import Learning

_OF_NEAR = ("near_duplicates", "near_threshold")
_LATER = ("member", *_OF_NEAR)
"""Settings that were added after the first version with a prepared.json."""
_OF_SPLITS = ("valid_inputs", "test_inputs", "valid_fraction", "test_fraction")

_OF_WORKERS = frozenset({"num_workers", "block_bytes", "overwrite", "cluster", "workdir"})
"""Settings that say where and how the work is done. They do not change the corpus."""


@dataclass(frozen=True)
class PrepareSettings(Learning):
    """Settings of `txl prepare` and `prepare_corpus`. Shard sizes are in tokens. Fractions are shares of the number of
    documents."""

    inputs: Sequence[str | Path]
    """Files, folders, patterns, URLs, `-` (stdin), `pipe:COMMAND` or `stdlib` (built-in text). Or the name of one
    public corpus, such as enwik8, without any other input."""
    valid_inputs: Sequence[str | Path] = ()
    """Inputs of the validation split. Default: the inputs whose names say validation, or else a share of the train
    documents (--valid-fraction)."""
    test_inputs: Sequence[str | Path] = ()
    """Inputs of the test split. Default: the inputs whose names say test, or else a share of the train documents
    (--test-fraction)."""
    valid_fraction: float = 0.05
    """Share of the train documents to hold out for the validation split. If there are too few documents, the ends of
    documents are held out instead. 0: no validation split."""
    test_fraction: float = 0.0
    """Share of the train documents to hold out for the test split, as with --valid-fraction. 0: no test split."""
    ignore_split_names: bool = False
    """Train on all inputs, whatever their names. Default: files and folders named valid, dev, val or test belong to the
    validation or test split."""
    archive: str = ""
    """Local copy of a named corpus to use instead of a download: its archive, its file, or a folder of its files."""
    kind: str = "auto"
    """Kind of tokenizer to train on the train split. auto: for a named corpus the kind that papers use, for other
    inputs bpe."""
    tokenizer_all_splits: bool = False
    """Train the tokenizer on the text of all splits, as papers with closed vocabularies do."""
    tokenizer_fraction: float = 1.0
    """Share of the train documents that the tokenizer is trained on. A hash of a document's content decides whether the
    document belongs to this share."""
    tokenizer_path: str | Path | None = None
    """Existing tokenizer file to use instead of training a tokenizer: Hugging Face's tokenizer.json, a sentencepiece
    model, or a tokenizer.json of this package. It can be a path or a URL."""
    vocab_list: str | Path | None = None
    """File with the names of the token ids, one name per line, id 0 first. With this option the inputs are token ids
    instead of text: .npy arrays (one document, or one document per row) or JSON lines (one list per line). The
    end-of-text token is added as the last id."""
    documents: Cut = "file"
    """Unit of plain text that becomes a document. A JSON line or a parquet row is always one document.
    jsonl: read text files as JSON lines, whatever their suffix."""
    jsonl_field: str = "text"
    """JSON field or parquet column that contains the text."""
    member: str = ""
    """Member of each sample of a WebDataset tar that contains the text, by its suffix, for instance txt or json.
    Default: the only member that ends in .txt, .json or .jsonl."""
    stdin_format: Literal["auto", "text", "jsonl"] = "auto"
    """Format of stdin (`-`) and of `pipe:` commands. auto: JSON lines if the first line is a JSON object, otherwise
    text."""
    encoding_errors: EncodingErrors = "refuse"
    """Handling of text that is not UTF-8. refuse: stop with an error. replace: read invalid bytes as U+FFFD. skip:
    leave out the document. keep: keep the bytes (byte tokenizers only)."""
    skip_invalid: bool = False
    """Leave out and count records without a text: invalid JSON, or a missing, null, repeated or non-text field.
    Default: stop with an error."""
    allow_protocols: Sequence[str] = ()
    """URL schemes to allow in addition to the defaults. `pipe` allows inputs that run shell commands."""
    duplicates: Literal["report", "drop", "ignore"] = "report"
    """Handling of exact duplicates, which are documents with equal text. report: count them. drop: also remove them.
    ignore: do not search for exact or near duplicates."""
    near_duplicates: Literal["estimate", "report", "drop", "ignore"] = "estimate"
    """Handling of near duplicates. estimate: count them roughly. report: count the documents that `drop` would remove.
    drop: of similar and equal documents keep only the first, or the first of the validation and test splits. ignore: do
    not search. report and drop need the package rensa."""
    near_threshold: float = 0.8
    """Minimum Jaccard similarity of near duplicates, for --near-duplicates report and drop. The similarity is estimated
    from the runs of 5 tokens of two documents (24 for byte and char tokenizers)."""
    seed: int = 0
    """Seed of the shuffled order of the train documents."""
    shard_len: int = 1 << 25
    """Approximate number of tokens per shard. A shard contains at most about a million documents."""
    num_workers: int = 0
    """Number of worker processes. 0: one per CPU core, or only the main process if the input is below 16 MiB."""
    block_bytes: int = 0
    """Bytes of input per worker task. 0: chosen from the size of the input. The value does not change the corpus."""
    overwrite: bool = False
    """Replace a different corpus in the output folder (--out)."""
    cluster: str = ""
    """Cluster whose nodes do the work: `ray`, or `ray=HOST:PORT`. All nodes must see the inputs and folders under the
    same paths or URLs. Default: processes of this machine."""
    workdir: str = ""
    """Folder in which the work folder is made. With --cluster, a folder that all nodes share. Also a URL of an object
    store. Default: next to the output."""

    def check(self) -> None:
        """Raise ConfigError for settings that are impossible or would have no effect."""
        for name in ("valid_fraction", "test_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be at least 0 and below 1. Give the share of documents for "
                    "the split, for instance 0.05, or 0 for no such split."
                )
        if self.valid_fraction + self.test_fraction >= 1:
            raise ConfigError("valid_fraction and test_fraction leave no text to train on. Keep their sum below 1.")
        self.check_given([split for split in (VALID, TEST) if getattr(self, f"{split}_inputs")])
        if not 0 < self.tokenizer_fraction <= 1:
            raise ConfigError(f"tokenizer_fraction={self.tokenizer_fraction} must be above 0 and at most 1.")
        if self.shard_len < 1:
            raise ConfigError(f"shard_len={self.shard_len} must be 1 or more: it is the number of tokens in a shard.")
        if min(self.num_workers, self.block_bytes) < 0:
            raise ConfigError("num_workers and block_bytes must be 0 or more. Give 0 for an automatic choice.")
        self._check_cluster()
        self._check_near()
        learning = self._changed("kind", *self.learning(), "tokenizer_all_splits")
        if self.tokenizer_path is not None and learning:
            raise ConfigError(
                f"{_flags(learning)} cannot be used with an existing tokenizer file ({self.tokenizer_path}). "
                f"Remove {_flags(learning)}, or remove {_flags(['tokenizer_path'])} to train a tokenizer."
            )
        of_text = {*learning, "tokenizer_path", "tokenizer_fraction", "documents", "encoding_errors", "archive"}
        of_text |= {"member"}
        unused = self._changed(*sorted(of_text - {"end_of_text"}))
        if self.vocab_list is not None and (unused or self.name is not None):
            raise ConfigError(
                f"{_flags(unused) or self.name} cannot be used with token ids, whose vocabulary is the list "
                f"{self.vocab_list}. Remove {_flags(unused) or self.name}, or remove --vocab-list to prepare text."
            )
        split_settings = self._changed(*_OF_SPLITS)
        if self.name is not None and split_settings:
            raise ConfigError(
                f"the named corpus {self.name} has its own splits. Remove {_flags(split_settings)}, or give the "
                "paths of the corpus's files as inputs."
            )
        if self.archive and self.name is None:
            raise ConfigError(
                "--archive can be used only with a named corpus, because the archive replaces the download of that "
                "corpus. Give the name of the corpus as the input, for instance enwik8, or remove --archive."
            )

    def _check_cluster(self) -> None:
        """Raise ConfigError for an unknown kind of cluster."""
        kind, equals, address = self.cluster.partition("=")
        is_valid = kind == "ray" and bool(address) == bool(equals)
        if self.cluster and not is_valid:
            raise ConfigError(f"cluster={self.cluster}: it must be ray or ray=HOST:PORT.")

    def _check_near(self) -> None:
        """Raise ConfigError for settings of near duplicates that are impossible or would have no effect, or if the
        package that they need is not installed."""
        if not self.compares_signatures:
            if self._changed("near_threshold"):
                raise ConfigError(
                    f"--near-threshold {self.near_threshold} has no effect with --near-duplicates "
                    f"{self.near_duplicates}. Add `--near-duplicates drop` or `--near-duplicates report`."
                )
            return
        if self.duplicates == "ignore":
            raise ConfigError(
                f"--duplicates ignore skips the search that --near-duplicates {self.near_duplicates} needs. Remove "
                "--duplicates ignore."
            )
        percent = 100 * self.near_threshold
        if not 50 <= percent <= 100 or abs(percent - round(percent)) > 1e-6:
            raise ConfigError(
                f"--near-threshold {self.near_threshold} must be from 0.5 to 1, in steps of 0.01. Smaller similarities "
                "are common between unrelated texts of one kind."
            )
        if importlib.util.find_spec("rensa") is None:
            raise ConfigError(
                f"--near-duplicates {self.near_duplicates} needs the package rensa. Install the extra: "
                'pip install "txl_dist[near-duplicates]"'
            )

    @property
    def compares_signatures(self) -> bool:
        """Whether near duplicates are found by comparing the MinHash signatures of documents (minhash.py)."""
        return self.near_duplicates in ("report", "drop")

    @property
    def learns(self) -> bool:
        """Whether a tokenizer is trained, because neither a tokenizer file nor a vocabulary list is given."""
        return self.tokenizer_path is None and self.vocab_list is None

    @property
    def name(self) -> str | None:
        """Name of the named corpus, such as enwik8, if it is the input. None for other inputs.

        Raises ConfigError if a named corpus is given together with other inputs.
        """
        from txl_dist.data.prepare.datasets import NAMED

        given = [str(each) for each in self.inputs]
        if len(given) == 1 and given[0] in NAMED:
            return given[0]
        mixed = set(given) & NAMED.keys()
        if mixed:
            raise ConfigError(
                f"the named corpus {mixed.pop()} must be the only input. Remove the other inputs. If a file with this "
                "name is meant, write its path with a folder, as in ./NAME."
            )
        return None

    def completed(self) -> PrepareSettings:
        """Check the settings, and return a copy with the defaults of the named corpus.

        Without a named corpus, the tokenizer kind `auto` becomes `bpe`. If near duplicates are dropped, exact
        duplicates are too. Settings that the caller changed are kept. Raises ConfigError as `check` does.
        """
        from txl_dist.data.prepare.datasets import NAMED

        self.check()
        if self.name is None:
            of_corpus = {}
        else:
            of_corpus = NAMED[self.name].tokenizer
        is_tokenizer_of_corpus = self.tokenizer_path is None and self.kind in ("auto", of_corpus.get("kind"))
        if not is_tokenizer_of_corpus:  # the other settings do not fit another tokenizer
            of_corpus = {name: value for name, value in of_corpus.items() if name == "documents"}
        defaults = {"kind": "bpe", **of_corpus}
        for name in self._changed(*defaults):
            del defaults[name]
        if self.name is not None:  # the corpus has its own splits
            defaults |= {"valid_fraction": 0.0, "test_fraction": 0.0}
        if self.near_duplicates == "drop":
            defaults["duplicates"] = "drop"
        return dataclasses.replace(self, **defaults)

    def reading(self, *, given: Collection[str]) -> Reading:
        """Return the options for reading documents.

        `given` are the splits that have their own files. No train documents are held out for these splits. Raises
        DataError for an invalid vocabulary list.
        """
        from txl_dist.tokenizers.listed import read_names

        return Reading(
            self.jsonl_field,
            () if self.vocab_list is None else read_names(self.vocab_list),
            self.encoding_errors,
            skip_invalid=self.skip_invalid,
            valid_fraction=0.0 if VALID in given else self.valid_fraction,
            test_fraction=0.0 if TEST in given else self.test_fraction,
        )

    def check_given(self, given: Collection[str]) -> None:
        """Raise ConfigError if a fraction is set for a split in `given`, the splits that have their own files."""
        for split in (VALID, TEST):
            name = f"{split}_fraction"
            if split in given and getattr(self, name) and self._changed(name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} has no effect, because the split {split} has its own files. Remove "
                    f"{name}. If `txl prepare` chose these files only because of their names, you can add "
                    "`--ignore-split-names` instead: all files are then used for training."
                )

    def content_hash(self) -> str:
        """Return a hash of all settings that change the corpus, except the inputs.

        The hash uses the names that settings had in version 0.2, and leaves out later settings that have their
        defaults. So a corpus that an older version prepared is recognized.
        """
        of_inputs = {"inputs", "valid_inputs", "test_inputs", "archive", "stdin_format", "allow_protocols"}
        kept = self._facts(of_inputs | _OF_WORKERS | self._later_defaults())
        by_old_name = sorted(keywords_in_old_names(kept, command="prepare").items())
        return hashlib.sha256(repr(dict(by_old_name)).encode()).hexdigest()

    def stamp(self) -> str:
        """Return a hash of the settings that change the parts of a preparation, which are its tokenized pieces of
        input.

        The hash includes the paths of the inputs, but not their content.
        """
        kept = self._facts({"shard_len", "duplicates", "allow_protocols", *_OF_NEAR, *_OF_WORKERS - {"block_bytes"}})
        inputs = [_as_texts(self.inputs), _as_texts(self.valid_inputs), _as_texts(self.test_inputs)]
        kept["inputs"] = repr(inputs)
        if self.compares_signatures:
            from importlib.metadata import version

            near = f"{self.near_threshold} rensa {version('rensa')}"  # another version can give other signatures
        elif self.duplicates == "ignore":
            near = "ignore"
        else:
            near = self.near_duplicates
        facts: tuple[Any, ...] = (sorted(kept.items()), near, __version__)
        plugins = loaded_plugins()
        if plugins:
            facts = (*facts, plugins)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def _facts(self, left_out: Collection[str]) -> dict[str, str]:
        """Return the settings except `left_out` as text, by name.

        A tokenizer file or a vocabulary list is represented by the hash of its content.
        """
        names = {field.name for field in dataclasses.fields(self)} - set(left_out)
        kept = {name: str(getattr(self, name)) for name in names}
        if self.tokenizer_path is not None:
            from txl_dist.data.prepare.shared_files import read_tokenizer_file

            kept["tokenizer_path"] = hashlib.sha256(read_tokenizer_file(self.tokenizer_path)).hexdigest()
        if self.vocab_list is not None:
            names_of_ids = "\n".join(self.reading(given=()).names)
            kept["vocab_list"] = hashlib.sha256(names_of_ids.encode()).hexdigest()
        return dict(sorted(kept.items()))

    def _later_defaults(self) -> set[str]:
        """Return the names of the settings that are newer than prepared.json and have their defaults."""
        return set(_LATER) - set(self._changed(*_LATER))

    def _changed(self, *names: str) -> list[str]:
        """Return the names in `names` whose settings differ from their defaults."""
        return [name for name in names if getattr(self, name) != getattr(PrepareSettings, name)]


def _flags(names: Sequence[str]) -> str:
    """Return the command-line flags of settings, joined by commas."""
    other_names = {"kind": "tokenizer", "tokenizer_path": "tokenizer-file"}
    flags = []
    for name in names:
        flag = other_names.get(name, name.removesuffix("_inputs"))
        flags.append(flag_of(flag))
    return ", ".join(flags)


def _as_texts(inputs: Sequence[str | Path]) -> list[str]:
    return [str(path) for path in inputs]
