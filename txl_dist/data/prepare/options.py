"""Settings of `txl prepare`: their checks, and the defaults that a named corpus brings.

Light to import, because the command line makes its flags from them.
"""

from __future__ import annotations

import dataclasses
import hashlib
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

_OF_SPLITS = ("valid_inputs", "test_inputs", "valid_fraction", "test_fraction")


@dataclass(frozen=True)
class PrepareSettings(Learning):
    """Settings of one preparation. Sizes of shards are in tokens, fractions are shares of the documents."""

    inputs: Sequence[str | Path]
    """Files, folders, globs, URLs, `-`, `pipe:COMMAND`, `stdlib`; or the name of one corpus of datasets.py."""
    valid_inputs: Sequence[str | Path] = ()
    """Inputs of the validation split. Default: files named valid, or a share of the documents."""
    test_inputs: Sequence[str | Path] = ()
    """Inputs of the test split, as for --valid."""
    valid_fraction: float = 0.05
    """Share of the documents, or of the text of a few, for the validation split. 0: no split."""
    test_fraction: float = 0.0
    """Share for the test split, as for --valid-fraction."""
    ignore_split_names: bool = False
    """Train on all inputs. Default: files and folders named train, valid, dev, val or test keep these splits."""
    archive: str = ""
    """Local archive, file or folder of a named corpus, instead of a download."""
    kind: str = "auto"
    """Kind of tokenizer to train on the train split. auto: that of the named corpus, else bpe."""
    tokenizer_all_splits: bool = False
    """Train the tokenizer on all splits, as papers do for closed vocabularies."""
    tokenizer_fraction: float = 1.0
    """Share of the train documents for training the tokenizer, chosen by a hash."""
    tokenizer_path: str | Path | None = None
    """Existing tokenizer to use instead of training one. See `import_tokenizer`."""
    vocab_list: str | Path | None = None
    """The inputs are token ids instead of text: .npy (a document, or one per row) or JSON lines (a list each). This
    file names the ids, one per line, id 0 first. End-of-text is added last."""
    documents: Cut = "file"
    """How plain text is cut into documents. JSON lines and rows of parquet are one each. jsonl: whatever the suffix."""
    jsonl_field: str = "text"
    """JSON field or parquet column that holds the text."""
    stdin_format: Literal["auto", "text", "jsonl"] = "auto"
    """Format of `-` and `pipe:`. auto: JSON lines if the first line is an object, else text."""
    encoding_errors: EncodingErrors = "refuse"
    """Handling of text that is not UTF-8. keep: leave the bytes as they are, for byte tokenizers."""
    skip_invalid: bool = False
    """Skip and count records without a text: invalid JSON, or a missing, null, repeated or non-text field. Default:
    refuse them."""
    allow_protocols: Sequence[str] = ()
    """Additional URL schemes to allow. `pipe` runs a shell."""
    duplicates: Literal["report", "drop", "ignore"] = "report"
    """report: count exact and near duplicates. drop: also remove the exact ones. ignore: neither."""
    seed: int = 0
    """Seed of the order of the train documents."""
    shard_len: int = 1 << 25
    """Approximate tokens per shard. A shard holds at most a million documents."""
    num_workers: int = 0
    """Number of processes. 0: one per core, or only this one below 16 MiB of input."""
    block_bytes: int = 0
    """Bytes of input per worker task. 0: by the size of the input. Does not change the output."""
    overwrite: bool = False
    """Replace another corpus in --out."""

    def check(self) -> None:
        """Raise ConfigError for settings that are impossible, or would have no effect."""
        for name in ("valid_fraction", "test_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be at least 0 and below 1. Give the share of documents for "
                    "the split, for instance 0.05, or 0 for no such split."
                )
        if self.valid_fraction + self.test_fraction >= 1:
            raise ConfigError("valid_fraction and test_fraction leave nothing to train on: keep their sum below 1.")
        self.check_given([split for split in (VALID, TEST) if getattr(self, f"{split}_inputs")])
        if not 0 < self.tokenizer_fraction <= 1:
            raise ConfigError(f"tokenizer_fraction={self.tokenizer_fraction} must be above 0 and at most 1.")
        if self.shard_len < 1:
            raise ConfigError(f"shard_len={self.shard_len} must be 1 or more: it is the number of tokens in a shard.")
        if min(self.num_workers, self.block_bytes) < 0:
            raise ConfigError("num_workers and block_bytes must be 0 or more; 0 lets the program choose.")
        learning = self._changed("kind", *self.learning(), "tokenizer_all_splits")
        if self.tokenizer_path is not None and learning:
            raise ConfigError(
                f"{_flags(learning)} have no meaning with an existing tokenizer file ({self.tokenizer_path}). "
                "Leave them out, or leave the file out to train a tokenizer."
            )
        of_text = {*learning, "tokenizer_path", "tokenizer_fraction", "documents", "encoding_errors", "archive"}
        unused = self._changed(*sorted(of_text - {"end_of_text"}))
        if self.vocab_list is not None and (unused or self.name is not None):
            raise ConfigError(
                f"{_flags(unused) or self.name} has no meaning with token ids, whose vocabulary is a list "
                f"({self.vocab_list}). Leave it out, or leave the list out to prepare text."
            )
        split_settings = self._changed(*_OF_SPLITS)
        if self.name is not None and split_settings:
            raise ConfigError(
                f"the named corpus {self.name} has its own splits. Leave out {_flags(split_settings)}, or give the "
                "paths of its files."
            )
        if self.archive and self.name is None:
            raise ConfigError("--archive replaces the download of a named corpus. Give the corpus's name as the input.")

    @property
    def learns(self) -> bool:
        """Whether a tokenizer is trained, because none is given."""
        return self.tokenizer_path is None and self.vocab_list is None

    @property
    def name(self) -> str | None:
        """Name of the named corpus that is the input; None for other inputs.

        Raises ConfigError if there are other inputs too.
        """
        from txl_dist.data.prepare.datasets import NAMED

        given = [str(each) for each in self.inputs]
        if len(given) == 1 and given[0] in NAMED:
            return given[0]
        mixed = set(given) & NAMED.keys()
        if mixed:
            raise ConfigError(
                f"the named corpus {mixed.pop()} is prepared alone. For a file of that name give its path."
            )
        return None

    def completed(self) -> PrepareSettings:
        """Check the settings, and return them with the defaults of the named corpus, or with the tokenizer bpe.

        Settings that the caller changed stay. Raises ConfigError as `check` does.
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
        return dataclasses.replace(self, **defaults)

    def reading(self, *, given: Collection[str]) -> Reading:
        """Return the options for reading documents. `given` are the splits that have files; train gives them nothing.

        Raises DataError for an invalid vocabulary list.
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
        """Raise ConfigError if a fraction is set for one of the splits `given`, which have files."""
        for split in (VALID, TEST):
            name = f"{split}_fraction"
            if split in given and getattr(self, name) and self._changed(name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} has no meaning when the split {split} has files. Leave it out. "
                    "If the split comes from the names of files, train on all of them with `--ignore-split-names`."
                )

    def content_hash(self) -> str:
        """Return a hash of all settings that change the corpus, except the inputs.

        It uses the names that settings had in version 0.2, so that a corpus prepared by 0.2 is recognized.
        """
        of_inputs = {"inputs", "valid_inputs", "test_inputs", "archive", "stdin_format", "allow_protocols"}
        kept = self._facts(of_inputs | {"num_workers", "block_bytes", "overwrite"})
        by_old_name = sorted(keywords_in_old_names(kept, command="prepare").items())
        return hashlib.sha256(repr(dict(by_old_name)).encode()).hexdigest()

    def stamp(self) -> str:
        """Return a hash of all settings that change the parts of a preparation, except the content of the inputs."""
        kept = self._facts({"shard_len", "num_workers", "overwrite", "duplicates", "allow_protocols"})
        inputs = [_as_texts(self.inputs), _as_texts(self.valid_inputs), _as_texts(self.test_inputs)]
        kept["inputs"] = repr(inputs)
        ignores_duplicates = self.duplicates == "ignore"
        facts: tuple[Any, ...] = (sorted(kept.items()), ignores_duplicates, __version__)
        plugins = loaded_plugins()
        if plugins:
            facts = (*facts, plugins)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def _facts(self, left_out: Collection[str]) -> dict[str, str]:
        """Return the settings by name, as text. Files are given by the hash of their content."""
        names = {field.name for field in dataclasses.fields(self)} - set(left_out)
        kept = {name: str(getattr(self, name)) for name in names}
        if self.tokenizer_path is not None:
            from txl_dist.tokenizers.tokenizer import tokenizer_bytes

            content = tokenizer_bytes(self.tokenizer_path, remedy="Check the path.")
            kept["tokenizer_path"] = hashlib.sha256(content).hexdigest()
        if self.vocab_list is not None:
            names_of_ids = "\n".join(self.reading(given=()).names)
            kept["vocab_list"] = hashlib.sha256(names_of_ids.encode()).hexdigest()
        return dict(sorted(kept.items()))

    def _changed(self, *names: str) -> list[str]:
        """Return those of the names whose settings are not at their defaults."""
        return [name for name in names if getattr(self, name) != getattr(PrepareSettings, name)]


def _flags(names: Sequence[str]) -> str:
    """Return the flags of settings, joined by commas."""
    other_names = {"kind": "tokenizer", "tokenizer_path": "tokenizer-file"}
    flags = []
    for name in names:
        flag = other_names.get(name, name.removesuffix("_inputs"))
        flags.append(flag_of(flag))
    return ", ".join(flags)


def _as_texts(inputs: Sequence[str | Path]) -> list[str]:
    return [str(path) for path in inputs]
