"""`txl report` of a checkpoint or a bundle: its run's page where it lies in a run, else a page of what it holds itself.

Neither has records of a training, so such a page shows no curve: what the model is, where it comes from, its settings.
It is written beside the folder, never into it, where a file that the manifest does not list is damage.
"""

from __future__ import annotations

import json
from pathlib import Path

from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.files import parse_object, read_bytes
from txl_dist.ops.report.records import history_of
from txl_dist.ops.report.report import check_writable, setting_rows, write_page, write_report
from txl_dist.ops.report.summary import Run, defaults, fact_lines, facts_of, read_settings
from txl_dist.run_files import RECORDS, STATE, Kind, kind_of
from txl_dist.tables import printable


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
        run = _bundle(folder) if kind is Kind.BUNDLE else _checkpoint(folder)
        facts = facts_of(run)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error!r}. `txl verify {folder}` lists its damage.") from error
    lead = f"{kind.value[2:].capitalize()} without the records of its training: txl report of its run has those."
    rows = setting_rows([run.settings, defaults()], ["this model", "default"]) if run.settings else []
    content = {"title": printable(run.name), "lead": lead, "facts": facts, "setting_rows": rows, "run": run}
    return [lead, *fact_lines(facts), write_page(page, "model.html.j2", **content)]


def _bundle(folder: Path) -> Run:
    """What it tells of the run that it comes from."""
    content = parse_object(read_bytes(folder / "config.json"))
    source = dict(content["source"])
    origin = f"imported from {source.get('file', 'elsewhere')} ({source.get('imported', 'unknown')})"
    if "step" in source:
        origin = f"step {source['step']:,} of {source.get('run', 'a run')}"
    settings = {f"model.{name}": value for name, value in dict(content["model"]).items()}
    settings |= {f"train.{name}": content[name] for name in ("segment_len", "memory_len")}
    settings |= {"data.document_border": content["document_border"]}
    state = {"vocab_size": content["vocab_size"], "dtype": content["dtype"]}
    return Run(folder, history_of([]), settings, "", state, f"from {origin}")


def _checkpoint(folder: Path) -> Run:
    """As a run whose only record is how far it is."""
    state = parse_object(read_bytes(folder / STATE))
    settings, problem = read_settings(folder)
    record = {"kind": "train", "step": state["step"], "tokens_seen": state["tokens_seen"]}
    ranks = f"saved by {state['world_size']} ranks"
    return Run(folder, history_of([json.dumps(record).encode()]), settings, problem, state, ranks)
