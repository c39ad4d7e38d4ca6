"""Commands that show runs. `txl report` shows one run in full, and `txl compare` shows several side by side."""

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
    """Show a run, finished or in progress, in a few lines and in an HTML page that works offline.

    Args:
        path: Run directory (--run.dir) or checkpoint (shows the checkpoint's run), bundle or hf://OWNER/NAME (shows the
            model card).
        out: Page to write. Default: RUN/report.html, or BUNDLE.html next to a bundle.
    """
    address = address_of(path)
    if address is not None and out is None:
        out = Path(f"{address.name}.html")  # not into the cache
    path = local_source(path)
    kind = require(path, *TRAINED)
    echo(f"txl report: reading {path}", to=sys.stderr)
    from txl_dist.report.model_page import report_of

    lines = report_of(path, kind, out=out)
    echo("\n".join(lines))


def compare(runs: Positional[tuple[Path, ...]], /, out: Path = Path("compare.html")) -> None:
    """Show several runs next to each other in lines and an HTML page: settings that differ, figures and loss curves.

    Args:
        runs: Folders of the runs.
        out: Page to write.
    """
    remedy = "Name the run directory, which contains the records."
    remedies = {ArtifactKind.CHECKPOINT: remedy, ArtifactKind.BUNDLE: remedy}
    for path in runs:
        require(path, ArtifactKind.RUN, remedies=remedies)
    num_runs = counted(len(runs), "run")
    if len(runs) > 1:  # a single run is refused at once
        echo(f"txl compare: reading {num_runs}", to=sys.stderr)
    from txl_dist.report.compare import write_comparison

    lines = write_comparison(runs, out=out)
    echo("\n".join(lines))
