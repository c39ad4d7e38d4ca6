"""Commands that make and check corpora: `txl prepare` and `txl verify`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from txl_dist.artifacts import TRAINED, ArtifactKind, detect_artifact, is_url, require
from txl_dist.cli.parsing import local_source
from txl_dist.config.registry import load_plugins
from txl_dist.console.echo import echo
from txl_dist.console.suggest import did_you_mean
from txl_dist.data.prepare.options import PrepareSettings
from txl_dist.errors import ConfigError
from txl_dist.io.hub import address_of
from txl_dist.tokenizers.learning import LEARNT_KINDS


@dataclass(frozen=True, kw_only=True)
class PrepareArguments(PrepareSettings):
    """Arguments of `txl prepare`: the settings of a preparation, some of them under shorter names."""

    inputs: Positional[tuple[str, ...]]
    """Files, folders, quoted globs or URLs of text, JSON lines, parquet or WebDataset tars, which may be compressed. Or
    `-` (standard input), `pipe:COMMAND`, or `stdlib` (source of Python's standard library). Or a named corpus: enwik8,
    text8, wikitext-103, wikitext-2, lm1b, tinyshakespeare."""
    out: str
    """Folder in which the corpus is written, or URL of an object store."""
    valid_inputs: Annotated[tuple[str, ...], arg(name="valid")] = ()
    """Inputs of the validation split. Default: input files named valid, else a share of the documents."""
    test_inputs: Annotated[tuple[str, ...], arg(name="test")] = ()
    """Inputs of the test split. Default: input files named test, else a share of the documents."""
    archive: str = ""
    """Local archive, file or folder of a named corpus, instead of a download."""
    kind: Annotated[str, arg(name="tokenizer", metavar="{auto,byte,char,word,bpe,unigram}")] = "auto"
    """Kind of tokenizer to train on the train split, possibly a plugin's. auto: the papers' kind for a named corpus,
    else bpe."""
    tokenizer_path: Annotated[str | None, arg(name="tokenizer-file")] = None
    """Tokenizer to use instead of training one: our or Hugging Face's tokenizer.json, a sentencepiece .model, a
    folder with one of them, or the URL of such a file."""
    vocab_list: Path | None = None
    """File with the names of token ids, one per line, id 0 first. The inputs are then ids instead of text: .npy (one
    document, or one per row) or JSON lines (a list per line). End-of-text becomes the last id."""
    plugins: tuple[str, ...] = ()
    """Python modules to import first, which runs their code."""
    reindex: bool = False
    """Only write the records and the index for existing tars of tokens in --out: for the tars that are given as inputs,
    or for all tars. Needs the --tokenizer-file that made the tokens."""

    def check_tokenizer(self) -> None:
        """Raise ConfigError for an unknown kind of tokenizer."""
        choices = ("auto", *LEARNT_KINDS)
        if self.kind not in choices:
            hint = did_you_mean(self.kind, choices)
            raise ConfigError(f"--tokenizer {self.kind}: it can be {', '.join(choices)}.{hint}")


def prepare(arguments: Annotated[PrepareArguments, arg(name="")]) -> None:
    """Turn text into a corpus: tar shards, index.json and tokenizer.json.

    After an interruption, the same command continues.
    """
    load_plugins(arguments.plugins)
    arguments.check_tokenizer()
    if not is_url(arguments.out) and detect_artifact(arguments.out) is not ArtifactKind.NOTHING:
        require(
            arguments.out,
            ArtifactKind.CORPUS,
            what="--out",
            remedies=dict.fromkeys(ArtifactKind, "Choose another --out."),
        )
    if arguments.reindex:
        return _reindex(arguments)
    from txl_dist.console.logging import start_logging
    from txl_dist.data.prepare.run import prepare_corpus

    start_logging()
    settings = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(PrepareSettings)}
    if arguments.cluster or arguments.workdir or "://" in arguments.out:
        from txl_dist.data.prepare.cluster import prepare_on_cluster

        summary = prepare_on_cluster(arguments.out, **settings)
    else:
        summary = prepare_corpus(arguments.out, **settings)
    echo("\n".join(summary.lines()))


def _reindex(arguments: PrepareArguments) -> None:
    from txl_dist.console.logging import start_logging
    from txl_dist.console.progress import Progress
    from txl_dist.data.prepare.reindex import bytes_of_tars, reindex_corpus

    known = ("inputs", "out", "plugins", "tokenizer_path", "ignore_split_names", "overwrite", "reindex")
    others = [field for field in dataclasses.fields(arguments) if field.name not in known]
    unused = [field.name for field in others if getattr(arguments, field.name) != field.default]
    if unused or arguments.tokenizer_path is None:
        raise ConfigError(
            "--reindex does not tokenize. Give the tokenizer that made the tokens with --tokenizer-file"
            + (f", and remove {', '.join(unused)}, which would have no effect." if unused else ".")
        )
    start_logging()
    folder = Path(arguments.out)
    with Progress("reading tars", total=bytes_of_tars(folder, arguments.inputs)) as progress:
        summary = reindex_corpus(
            folder,
            inputs=arguments.inputs,
            tokenizer_path=arguments.tokenizer_path,
            ignore_split_names=arguments.ignore_split_names,
            overwrite=arguments.overwrite,
            on_bytes=progress.advance,
        )
    echo("\n".join(summary.lines()))


def verify(
    path: Positional[str],
    /,
    num_workers: int = 0,
    cache_dir: str = "",
    allow_protocols: tuple[str, ...] = (),
) -> None:
    """Check every hash of a corpus, a run or an export. Damaged files are listed, and the exit code is then 1.

    Args:
        path: Folder of a corpus, run, checkpoint, bundle or export with a manifest. Or a corpus's URL, or
            hf://OWNER/NAME.
        num_workers: Number of worker processes for a corpus. 0: one per CPU core, or none for a small corpus.
        cache_dir: Folder that caches whole shards of a corpus at a URL. Without it, only the needed byte ranges are
            read.
        allow_protocols: Additional URL schemes to allow. `pipe` runs a shell.
    """
    from txl_dist.config.schema import DataSection

    if address_of(path):
        path = str(local_source(path))
    no_manifest = (
        "This folder has no manifest. Verify the bundle that it was exported from, or import it: `txl import {path} "
        "BUNDLE  "
    )
    instead = {ArtifactKind.HUGGINGFACE: no_manifest + "--format huggingface`."}
    kind = require(
        path, ArtifactKind.CORPUS, *TRAINED, ArtifactKind.HUGGINGFACE_CODE, ArtifactKind.ONNX, remedies=instead
    )
    if kind is ArtifactKind.CORPUS:
        from txl_dist.console.logging import start_logging
        from txl_dist.data.verify.verify import problems_at

        start_logging()
        settings = DataSection(cache_dir=cache_dir, allow_protocols=allow_protocols)
        problems: Iterable[str] = problems_at(path, settings, num_workers=num_workers)
    elif kind in (ArtifactKind.BUNDLE, ArtifactKind.HUGGINGFACE_CODE, ArtifactKind.ONNX):
        from txl_dist.io.manifest import problems_of

        problems = problems_of(Path(path))
    else:
        from txl_dist.train.checkpoint.validate import checkpoint_problems, run_problems  # brings torch

        if kind is ArtifactKind.RUN:
            problems = run_problems(Path(path))
        else:
            problems = checkpoint_problems(Path(path))
    num_problems = 0
    for problem in problems:
        echo(problem, flush=True)
        num_problems += 1
    if num_problems:
        raise SystemExit(1)
    echo(f"{path}: whole")
