"""Verbs that show what runs did: one in full, several side by side."""

from __future__ import annotations

import sys
from pathlib import Path

from tyro.conf import Positional

from txl_dist.artifacts import TRAINED, ArtifactKind, require
from txl_dist.cli.parsing import local_source
from txl_dist.console.echo import echo
from txl_dist.console.formatting import counted
from txl_dist.io.hub import address_of


def report(path: Positional[Path], /, out: Path | None = None) -> None:
    """Show a run, finished or in progress: a few lines here, and one HTML page with pictures, readable offline.

    Args:
        path: Folder of the run (--run.dir); or a checkpoint, which shows its run, or a bundle or hf://OWNER/NAME, which
            show their model card.
        out: Page to write; RUN/report.html if not given, and for a bundle BUNDLE.html next to it.
    """
    address = address_of(path)
    if address is not None and out is None:
        out = Path(f"{address.name}.html")  # not into the cache
    path = local_source(path)
    kind = require(path, *TRAINED)
    echo(f"txl report: reading {path}", to=sys.stderr)
    from txl_dist.report.model_page import report_of

    echo("\n".join(report_of(path, kind, out=out)))


def compare(runs: Positional[tuple[Path, ...]], /, out: Path = Path("compare.html")) -> None:
    """Show several runs side by side: settings that differ, figures, loss curves; lines here, and one HTML page.

    Args:
        runs: Folders of the runs.
        out: Page to write.
    """
    run = "Name its run: it has no records of its own."
    for path in runs:
        require(path, ArtifactKind.RUN, remedies={ArtifactKind.CHECKPOINT: run, ArtifactKind.BUNDLE: run})
    if len(runs) > 1:  # one is refused at once
        echo(f"txl compare: reading {counted(len(runs), 'run')}", to=sys.stderr)
    from txl_dist.report.compare import write_comparison

    echo("\n".join(write_comparison(runs, out=out)))
