"""`txl report` of a checkpoint or a bundle: its run's page where it lies in a run, else a page of what it holds itself.

Neither has records of a training, so such a page shows no curve: what the model is, where it comes from, its settings.
It is written beside the folder, never into it, where a file that the manifest does not list is damage.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.files import parse_object, read_bytes
from txl_dist.ops.report.report import check_writable, setting_rows, write_page, write_report
from txl_dist.ops.report.summary import Fact, fact_lines, read_settings
from txl_dist.run_files import RECORDS, STATE, Kind, kind_of
from txl_dist.tables import compact, printable


def report_of(path: Path, kind: Kind, *, out: Path | None) -> list[str]:
    """Write the page of a run, a checkpoint or a bundle. Returns lines for people. Raises TxlError."""
    run = path.resolve().parent.parent
    if kind is Kind.CHECKPOINT and kind_of(run) is Kind.RUN and (run / RECORDS).exists():
        return [printable(f"{path} is a checkpoint of the run {run}:"), *write_report(run, out=out)]
    return write_report(path, out=out) if kind is Kind.RUN else _write_model_page(path, kind, out=out)


def _write_model_page(folder: Path, kind: Kind, *, out: Path | None) -> list[str]:
    page = out or folder.resolve().with_name(folder.resolve().name + ".html")
    if page.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"a page in {folder} would be damage there: its manifest lists every file. Name another --out."
        )
    check_writable(page)
    try:
        facts, settings = _of_bundle(folder) if kind is Kind.BUNDLE else _of_checkpoint(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error!r}. `txl verify {folder}` lists its damage.") from error
    name = folder.resolve().name
    lead = f"{kind.value[2:].capitalize()} without the records of its training: txl report of its run has those."
    content = {"facts": facts, "setting_rows": setting_rows(settings)}
    return [
        lead,
        *fact_lines(facts),
        write_page(page, "model.html.j2", title=printable(name), name=printable(name), lead=lead, **content),
    ]


def _of_bundle(folder: Path) -> tuple[list[Fact], dict[str, Any]]:
    content = parse_object(read_bytes(folder / "config.json"))
    source, lengths = dict(content["source"]), {name: content[name] for name in ("segment_len", "memory_len")}
    if "step" in source:
        origin = f"step {source['step']:,} of {source.get('run', 'a run')}"
    else:
        origin = f"imported from {source.get('file', 'elsewhere')} ({source.get('imported', 'unknown')})"
    facts = [Fact("From", origin), *_shape_facts(content["vocab_size"], content["dtype"], lengths)]
    settings = {f"model.{name}": value for name, value in dict(content["model"]).items()}
    border = {"data.document_border": content["document_border"]}
    return facts, settings | {f"train.{name}": value for name, value in lengths.items()} | border


def _of_checkpoint(folder: Path) -> tuple[list[Fact], dict[str, Any]]:
    state = parse_object(read_bytes(folder / STATE))
    settings, _ = read_settings(folder)
    lengths = {name: settings.get(f"train.{name}") for name in ("segment_len", "memory_len")}
    parameters = sum(math.prod(shape) for shape in state["parameters"].values())
    facts = [
        Fact("Step", f"{state['step']:,}"),
        Fact("Tokens seen", compact(state["tokens_seen"]), f"{state['tokens_seen']:,}"),
        Fact("Parameters", compact(parameters), f"{parameters:,}"),
        *_shape_facts(state["vocab_size"], state["precision"], lengths),
        Fact(
            "Made by", f"txl_dist {state['code_version']}", f"{state['world_size']} ranks, ZeRO-{state['zero_stage']}"
        ),
    ]
    return facts, settings


def _shape_facts(vocab_size: int, dtype: str, lengths: dict[str, Any]) -> list[Fact]:
    return [
        Fact("Vocabulary", f"{vocab_size:,}", "ids"),
        Fact("Type", str(dtype)),
        Fact("Segment and memory", f"{lengths['segment_len']} and {lengths['memory_len']}", "tokens"),
    ]
