"""`txl report` of a checkpoint or a bundle (exported model).

For a checkpoint inside its run, the page of the run is written. The page of a bundle is its model card: what the model
is, how it was trained, scores, a sample and how to use it. The page of a checkpoint without its run shows its step and
its settings. The page of a bundle or of such a checkpoint is written next to its folder. A new file inside the folder
would not be in the manifest, and would count as damage.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from txl_dist.artifacts import RECORDS, STATE, ArtifactKind, detect_artifact
from txl_dist.config.renamed import keys_in_new_names
from txl_dist.config.schema import ModelSection
from txl_dist.console.formatting import counted, printable
from txl_dist.errors import CheckpointError, ConfigError, TxlError
from txl_dist.inference.card import Model, model_rows, protocols, read_card, score_rows, training_rows, usage_examples
from txl_dist.io.files import parse_object, read_bytes
from txl_dist.report.records import history_of
from txl_dist.report.report import check_writable, cut, setting_rows, write_page, write_report
from txl_dist.report.summary import Fact, RunRecords, defaults, fact_lines, facts_of, read_settings
from txl_dist.tokenizers.tokenizer import load_tokenizer

_WEIGHTS = "model.safetensors"
_SCALE = ".scale"
"""Suffix of the names of tensors that hold the scales of int8 weights. These scales are not counted as parameters."""


def report_of(path: Path, kind: ArtifactKind, *, out: Path | None) -> list[str]:
    """Write the page of a run, a checkpoint or a bundle, and return lines for the terminal.

    `out` is the page's file. If it is None, the page is written into the run's folder, or next to the checkpoint or
    bundle. Raises TxlError if the contents cannot be read or the page cannot be written.
    """
    run = path.resolve().parent.parent
    if kind is ArtifactKind.CHECKPOINT and detect_artifact(run) is ArtifactKind.RUN and (run / RECORDS).exists():
        return [printable(f"{path} is a checkpoint of the run {run}:"), *write_report(run, out=out)]
    if kind is ArtifactKind.RUN:
        return write_report(path, out=out)
    return _write_model_page(path, kind, out=out)


def _write_model_page(folder: Path, kind: ArtifactKind, *, out: Path | None) -> list[str]:
    page = out or folder.resolve().with_name(folder.resolve().name + ".html")
    if page.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"a page in {folder} would make `txl verify` report damage, because the manifest of {folder} lists every "
            "file. Name another folder with --out."
        )
    check_writable(page)
    try:
        if kind is ArtifactKind.BUNDLE:
            content = _bundle(folder)
        else:
            content = _checkpoint(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, TxlError):
            raise
        raise CheckpointError(
            f"{folder} cannot be read: {error!r}. `txl verify {folder}` lists what is damaged."
        ) from error
    return [content["lead"], *fact_lines(content["facts"]), write_page(page, "model.html.j2", **content)]


def _bundle(folder: Path) -> dict[str, Any]:
    """Return the content of a bundle's page, which is its model card."""
    config = keys_in_new_names(parse_object(read_bytes(folder / "config.json")), of="bundle")
    own_settings = dict(config["model"])
    model = Model(
        section=ModelSection.model_validate_json(json.dumps(own_settings)),
        vocab_size=int(config["vocab_size"]),
        segment_len=int(config["segment_len"]),
        memory_len=int(config["memory_len"]),
        memory_lens=tuple(config.get("memory_lens", ())),
        document_mask=config["document_mask"],
        dtype=str(config["dtype"]),
        tokenizer=_tokenizer_kind(folder),
        num_parameters=_num_parameters(folder),
        num_bytes=_num_bytes(folder),
        source=dict(config["source"]),
        card=read_card(folder),
    )
    settings = {f"model.{name}": value for name, value in own_settings.items()}
    settings |= {f"train.{name}": config[name] for name in ("segment_len", "memory_len")}
    settings |= {"data.document_mask": config["document_mask"]}
    card = model.card
    return {
        "title": model.title,
        "lead": f"Model card of {printable(str(folder))}. The page of its run, if you have it, shows the training.",
        "facts": [Fact(name, printable(value)) for name, value in (*model_rows(model), *training_rows(model))],
        "score_rows": score_rows(card.scores),
        "protocols": protocols(card.scores),
        "sample": card.sample and card.sample.model_copy(update={"text": cut(card.sample.text)}),
        "usage": usage_examples(model, ArtifactKind.BUNDLE, str(folder)),
        "setting_rows": setting_rows([settings, defaults()], ["this model", "default"]),
        "settings_problem": "",
        "is_bundle": True,
    }


def _tokenizer_kind(folder: Path) -> str | None:
    with suppress(TxlError):
        return load_tokenizer(folder / "tokenizer.json").kind
    return None


def _num_parameters(folder: Path) -> int | None:
    """Count a bundle's parameters by the header of its file of weights, without torch.

    Returns None if the header cannot be read.
    """
    with suppress(OSError, SafetensorError), safe_open(folder / _WEIGHTS, framework="numpy") as file:
        slices = [file.get_slice(name) for name in file.keys() if not name.endswith(_SCALE)]  # noqa: SIM118
        return int(sum(math.prod(one.get_shape()) for one in slices))
    return None


def _num_bytes(folder: Path) -> int | None:
    with suppress(OSError):
        return (folder / _WEIGHTS).stat().st_size
    return None


def _checkpoint(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's page. The page has the form of a run's page with a single record."""
    state = parse_object(read_bytes(folder / STATE))
    settings, problem = read_settings(folder)
    record = {"kind": "train", "step": state["step"], "tokens_seen": state["tokens_seen"]}
    ranks = f"saved by {counted(state['world_size'], 'rank')}"
    run = RunRecords(folder, history_of([json.dumps(record).encode()]), settings, problem, state, ranks)
    lead = "This checkpoint has no records of its training. `txl report RUN` shows the records of its run."
    return {
        "title": printable(run.name),
        "lead": lead,
        "facts": facts_of(run),
        "score_rows": [],
        "protocols": [],
        "sample": None,
        "usage": [],
        "setting_rows": setting_rows([settings, defaults()], ["this model", "default"]) if settings else [],
        "settings_problem": problem,
        "is_bundle": False,
    }
