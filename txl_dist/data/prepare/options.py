"""The settings of `txl prepare`: what may be asked for, what is refused, and what a named corpus brings.

Light to import, since the command line makes its flags from them.
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
from txl_dist.data.prepare.documents import TEST, VALID, Cut, EncodingErrors, Reading
from txl_dist.errors import ConfigError
from txl_dist.tokenizers.learning import Learning

_HELD_OUT = ("valid_inputs", "test_inputs", "valid_fraction", "test_fraction")


@dataclass(frozen=True)
class PrepareSettings(Learning):
    """What to prepare, and how. Sizes of shards are in tokens, shares are of documents."""

    inputs: Sequence[str | Path]
    """Files, folders, globs, URLs, `-`, `pipe:COMMAND`, `stdlib`; or the name of a corpus of named.py, alone."""
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
    """Tokenizer to learn from the train split. auto: that of the named corpus, else bpe."""
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
        """Raises ConfigError for settings that are impossible, or would have no effect."""
        for name in ("valid_fraction", "test_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be at least 0 and below 1. Give the share of documents to "
                    "hold out, for instance 0.05, or 0 for no held-out split."
                )
        if self.valid_fraction + self.test_fraction >= 1:
            raise ConfigError("valid_fraction and test_fraction leave nothing to train on: together stay below 1.")
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
                f"{_flags(learning)} have no meaning with a given tokenizer file ({self.tokenizer_path}). "
                "Leave them out, or leave the file out to train a tokenizer."
            )
        of_text = {*learning, "tokenizer_path", "tokenizer_fraction", "documents", "encoding_errors", "archive"}
        unused = self._changed(*sorted(of_text - {"end_of_text"}))
        if self.vocab_list is not None and (unused or self.name is not None):
            raise ConfigError(
                f"{_flags(unused) or self.name} has no meaning with ready ids, whose vocabulary is a list "
                f"({self.vocab_list}). Leave it out, or leave the list out to prepare text."
            )
        if self.name is not None and (held_out := self._changed(*_HELD_OUT)):
            raise ConfigError(
                f"the named corpus {self.name} has splits of its own. Leave out {_flags(held_out)}, or give the "
                "paths of its files."
            )
        if self.archive and self.name is None:
            raise ConfigError("--archive takes the place of a named corpus's download. Give its name as the input.")

    @property
    def learns(self) -> bool:
        """Whether a tokenizer is learnt, and none given."""
        return self.tokenizer_path is None and self.vocab_list is None

    @property
    def name(self) -> str | None:
        """Of the named corpus, if that is the input."""
        from txl_dist.data.prepare.datasets import NAMED

        given = [str(each) for each in self.inputs]
        if len(given) == 1 and given[0] in NAMED:
            return given[0]
        if mixed := set(given) & NAMED.keys():
            raise ConfigError(
                f"the named corpus {mixed.pop()} is prepared alone. For a file of that name give its path."
            )
        return None

    def completed(self) -> PrepareSettings:
        """With the tokenizer, and what else a named corpus brings, where the caller left them open; checked."""
        from txl_dist.data.prepare.datasets import NAMED

        self.check()
        own = {} if self.name is None else NAMED[self.name].tokenizer
        is_own_kind = self.kind in ("auto", own.get("kind"))
        if self.tokenizer_path is not None or not is_own_kind:  # its own tokenizer's settings do not fit another
            own = {name: value for name, value in own.items() if name == "documents"}
        own = {"kind": "bpe"} | own
        own = {name: own[name] for name in own.keys() - self._changed(*own)}
        if self.name is not None:  # its splits are its own
            own |= {"valid_fraction": 0.0, "test_fraction": 0.0}
        return dataclasses.replace(self, **own)

    def reading(self, *, given: Collection[str]) -> Reading:
        """How documents are read; splits that have files `given` for them take none from train. Raises DataError for a
        vocabulary list that is none."""
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
        """Raises ConfigError if a share is asked for of a split that has files of its own."""
        for split in (VALID, TEST):
            name = f"{split}_fraction"
            if split in given and getattr(self, name) and self._changed(name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} has no meaning beside given text for the split {split}. Leave it "
                    "out; or, where the names of files say so, train on all of them with `--ignore-split-names`."
                )

    def content_hash(self) -> str:
        """Hash of everything that changes the corpus, but for the inputs.

        Settings have the names of version 0.2 in it, so that a corpus which 0.2 prepared is recognized.
        """
        of_inputs = {"inputs", "valid_inputs", "test_inputs", "archive", "stdin_format", "allow_protocols"}
        kept = self._facts(of_inputs | {"num_workers", "block_bytes", "overwrite"})
        by_old_name = sorted(keywords_in_old_names(kept, command="prepare").items())
        return hashlib.sha256(repr(dict(by_old_name)).encode()).hexdigest()

    def stamp(self) -> str:
        """Hash of everything that changes the parts of a preparation, but for the content of the inputs."""
        kept = self._facts({"shard_len", "num_workers", "overwrite", "duplicates", "allow_protocols"})
        kept["inputs"] = repr([list(map(str, own)) for own in (self.inputs, self.valid_inputs, self.test_inputs)])
        facts: tuple[Any, ...] = (sorted(kept.items()), self.duplicates == "ignore", __version__)
        if plugins := loaded_plugins():
            facts = (*facts, plugins)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def _facts(self, left_out: Collection[str]) -> dict[str, str]:
        """Settings by name, files by the hash of their content."""
        names = {field.name for field in dataclasses.fields(self)} - set(left_out)
        kept = {name: str(getattr(self, name)) for name in names}
        if self.tokenizer_path is not None:
            from txl_dist.tokenizers.tokenizer import tokenizer_bytes

            content = tokenizer_bytes(self.tokenizer_path, remedy="Check the path.")
            kept["tokenizer_path"] = hashlib.sha256(content).hexdigest()
        if self.vocab_list is not None:
            kept["vocab_list"] = hashlib.sha256("\n".join(self.reading(given=()).names).encode()).hexdigest()
        return dict(sorted(kept.items()))

    def _changed(self, *names: str) -> list[str]:
        """Those that are not at their defaults."""
        return [name for name in names if getattr(self, name) != getattr(PrepareSettings, name)]


def _flags(names: Sequence[str]) -> str:
    """As the command line has them."""
    own = {"kind": "tokenizer", "tokenizer_path": "tokenizer-file"}
    return ", ".join(f"--{own.get(name, name.removesuffix('_inputs')).replace('_', '-')}" for name in names)
