"""Commands about trained models: `txl evaluate`, `txl export` and `txl import`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from txl_dist.artifacts import TRAINED, ArtifactKind, detect_artifact, require
from txl_dist.cli.parsing import announce, announce_ranks, local_source
from txl_dist.config.registry import load_plugins
from txl_dist.console.echo import echo
from txl_dist.console.formatting import format_bytes
from txl_dist.errors import ConfigError
from txl_dist.evaluation.options import AdaptationOptions, Outputs, Overrides
from txl_dist.inference.card import Stated
from txl_dist.io.hub import check_login, push_folder

WeightType = Literal["fp32", "bf16", "fp16", "int8"]


def evaluate(
    target: Positional[Path],
    /,
    overrides: Annotated[Overrides, arg(name="")],
    adaptation: Annotated[AdaptationOptions, arg(name="")],
    outputs: Annotated[Outputs, arg(name="")],
    data: str = "",
    baselines: bool = False,
    plugins: tuple[str, ...] = (),
) -> None:
    """Score a validation split with a trained run, a checkpoint or a bundle.

    Args:
        target: Run directory, checkpoint folder, bundle or hf://OWNER/NAME.
        overrides: Settings in which the evaluation differs from training.
        adaptation: Options of a second score, of a model that adapts to the text.
        outputs: Files that are written.
        data: Folder or URL of a corpus. Default: the run's corpus.
        baselines: Also score an order-0 (unigram) and a smoothed bigram model on the same split.
        plugins: Python modules to import first, which runs their code.
    """
    load_plugins(plugins)
    target = local_source(target)
    kind = require(target, *TRAINED)
    overrides.check(target, is_bundle=kind is ArtifactKind.BUNDLE, data=data)
    adaptation.check(overrides, outputs)
    outputs.check(overrides)
    for flag, corpus in (("--data", data), ("--adapt-train", adaptation.adapt_train)):
        if corpus:
            require(corpus, ArtifactKind.CORPUS, what=flag)
    announce_ranks(f"scoring {target}, {kind.value}" + (f", on {data}" if data else ""))
    from txl_dist.evaluation.evaluate import evaluate_trained

    lines = evaluate_trained(
        target, data=data, overrides=overrides, adaptation=adaptation, baselines=baselines, outputs=outputs
    )
    if lines:
        echo("\n".join(lines))


def export(
    source: Positional[Path],
    out: Positional[Path],
    /,
    stated: Annotated[Stated, arg(name="")] = Stated(),  # noqa: B008  frozen
    format: Literal["bundle", "huggingface", "huggingface-code", "onnx", "xlnet"] = "bundle",
    dtype: WeightType = "fp32",
    ema: bool = False,
    push_to_hub: str = "",
    private: bool = False,
    plugins: tuple[str, ...] = (),
) -> None:
    """Write a trained model as a bundle for inference, or in another program's format. The written model's losses are
    verified.

    Args:
        source: Run directory (its newest checkpoint), checkpoint folder, bundle or hf://OWNER/NAME.
        out: Folder to write. An older export of the same format there is replaced.
        stated: Facts for the model card (README.md in the folder) that the run does not record.
        format: bundle: our own format. huggingface: for TransfoXLLMHeadModel of transformers 4.46.3. huggingface-code:
            with its own code, for transformers 5. onnx: two graphs, for a token and for a chunk of tokens (needs the
            extra onnx). xlnet: for XLNet of transformers.
        dtype: Type of the weights. ONNX graphs are fp32. int8 is for bundles only, has a scale per row, and runs as
            fp32.
        ema: Write the moving average of the weights (optim.ema_decay). Only for bundles. Other formats are exported
            from the bundle.
        push_to_hub: Hugging Face Hub repository, OWNER/NAME, to upload the folder to. A missing repository is created.
        private: Create a missing repository as a private one.
        plugins: Python modules to import first, which runs their code.
    """
    load_plugins(plugins)
    if push_to_hub:
        check_login(push_to_hub)
    elif private:
        raise ConfigError("--private needs a repository that --push-to-hub creates. Give --push-to-hub OWNER/NAME too.")
    source = local_source(source)
    kind = require(source, *TRAINED)
    if ema and (format != "bundle" or kind is ArtifactKind.BUNDLE):
        raise ConfigError(
            "--ema works only for the export of a run or a checkpoint to a bundle, but this command exports "
            f"{kind.value} to {format}. First export the run or the checkpoint to a bundle with --ema. Then, if you "
            "need another format, export that bundle without --ema."
        )
    _require_output(out, _WRITES[format])
    if format == "onnx" and dtype != "fp32":
        raise ConfigError(f"--format onnx writes fp32, not {dtype}. Remove --dtype.")
    if dtype == "int8" and format != "bundle":
        raise ConfigError(
            f"int8 weights can be stored only in bundles, because programs that read {format} cannot load int8 "
            "weights. Give another --dtype, or --format bundle."
        )
    stated.check()
    remark = stated.remark()
    if remark:
        echo(remark, to=sys.stderr)
    announce(f"exporting {source}, {kind.value}")
    _write(source, out, stated, format=format, dtype=dtype, ema=ema)
    if push_to_hub:
        announce(f"pushing {out} to {push_to_hub}")
        echo(f"{out}: pushed, {push_folder(out, push_to_hub, private=private)}")


def _write(source: Path, out: Path, stated: Stated, *, format: str, dtype: WeightType, ema: bool) -> None:
    """Write the exported folder. Print its size, and the difference between its losses and the source's losses."""
    from txl_dist.convert.export import (
        export_bundle,
        export_to_huggingface,
        export_to_huggingface_code,
        export_to_onnx,
        export_to_xlnet,
    )

    if format in ("huggingface", "xlnet"):
        export_to = {"huggingface": export_to_huggingface, "xlnet": export_to_xlnet}[format]
        folder = export_to(source, out, dtype=dtype, stated=stated)
        echo(f"{out}: written from {folder}, and read back bit for bit")
        return
    if format == "onnx":
        error = export_to_onnx(source, out, stated=stated)
        echo(f"{out}: written; largest difference to {source} by ONNX Runtime {error:.2e} nats")
        return
    if format == "huggingface-code":
        written = export_to_huggingface_code(source, out, dtype=dtype, stated=stated)
        checked = "not checked: transformers 5 is not installed"
        if written.difference is not None:
            checked = f"largest difference to {source} by transformers {written.difference:.2e} nats"
        echo(f"{out}: written; {checked}")
        if not written.has_tokenizer:
            echo(
                "transformers has no tokenizer that gives the same ids. Use txl_tokenizer.json with txl_dist to "
                "tokenize."
            )
        return
    made = export_bundle(source, out, dtype=dtype, use_ema=ema, stated=stated)
    if dtype == "fp32":
        share = ""
    else:
        share = f", {made.share:.3f} of fp32"
    echo(
        f"{out}: written from {made.source}; largest difference to its source on the probe {made.error:.2e} nats; "
        f"weights {format_bytes(made.num_bytes)} in {dtype}{share}"
    )


def import_(
    path: Positional[Path],
    out: Positional[Path],
    /,
    format: Literal["original", "nvidia", "huggingface", "labml", "xlnet"],
    vocab: Path | None = None,
    settings: Path | None = None,
    segment_len: int = 0,
    memory_len: int = -1,
    dtype: WeightType = "fp32",
) -> None:
    """Convert another program's weights to a bundle. Code in the files of the weights is not run.

    Args:
        path: File, folder or hf://OWNER/NAME: model.pt or a state dict, checkpoint_last.pt, a Hugging Face folder, or
            labml's state dict.
        out: Folder of the bundle. An older bundle there is replaced.
        format: Program that wrote the weights: original (kimiyoung/transformer-xl), nvidia (DeepLearningExamples),
            huggingface, labml, or xlnet (a Hugging Face folder).
        vocab: Vocabulary, if the weights have none: cache.pt, vocab.txt, vocab.pkl, vocab.bin, a JSON list or
            tokenizer.json. Without a vocabulary, text is ids in decimal.
        settings: JSON file with settings that the weights lack, by the other program's names: {"n_head": 8, ...}.
        segment_len: Tokens per segment. With 0 the number is read from the file.
        memory_len: Tokens of memory. With -1 the number is read from the file.
        dtype: Type of the weights, as for `txl export`.
    """
    path = local_source(path)
    _require_foreign(path, format=format)
    _require_output(out, ArtifactKind.BUNDLE)
    from txl_dist.convert.importer import import_model

    made = import_model(
        path,
        out,
        format=format,
        settings=settings,
        vocab=vocab,
        segment_len=segment_len,
        memory_len=memory_len,
        dtype=dtype,
    )
    echo(
        f"{out}: {made.num_parameters:,} parameters, vocabulary {made.vocab_size:,}, segment {made.segment_len}, "
        f"memory {made.memory_len}"
    )
    if not made.has_vocabulary:
        echo(
            "the weights have no vocabulary, so text is written as ids in decimal (17 4 0). Give a vocabulary with "
            "--vocab"
        )


_WRITES = {
    "bundle": ArtifactKind.BUNDLE,
    "huggingface": ArtifactKind.HUGGINGFACE,
    "huggingface-code": ArtifactKind.HUGGINGFACE_CODE,
    "onnx": ArtifactKind.ONNX,
    "xlnet": ArtifactKind.HUGGINGFACE,
}
"""Kind of artifact that `txl export` writes, by --format."""


def _require_output(out: Path, kind: ArtifactKind) -> None:
    """Refuse an output folder that holds an artifact of another kind. Raises ConfigError."""
    another = "Choose another output folder."
    if detect_artifact(out) is not ArtifactKind.NOTHING:  # what is not a folder of ours at all, the writer refuses
        require(out, kind, remedies=dict.fromkeys(ArtifactKind, another))


def _require_foreign(path: Path, *, format: str) -> None:
    """Refuse a path that does not exist, or that holds an artifact of this package. Raises ConfigError."""
    kind = detect_artifact(path)
    if kind is ArtifactKind.HUGGINGFACE and format not in ("huggingface", "xlnet"):
        raise ConfigError(
            f"{path} is {kind.value}, and --format {format} cannot read such a folder. Give --format huggingface for a "
            "Transformer-XL, or --format xlnet for an XLNet."
        )
    ours = "txl_dist itself wrote it. To get a bundle: `txl export {path} BUNDLE`."
    if kind not in (ArtifactKind.HUGGINGFACE, ArtifactKind.NOTHING):
        instead = {ArtifactKind.RUN: ours, ArtifactKind.CHECKPOINT: ours}
        require(path, ArtifactKind.HUGGINGFACE, remedies=instead)
    if not os.path.lexists(path):
        raise ConfigError(f"{path} does not exist. Name the file or folder with the weights.")
