"""Verbs that show what runs did: one in full, several side by side."""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from txl_dist.console import say


def report(run: Positional[Path], /, out: Path | None = None) -> None:
    """Show a run, finished or in progress: a few lines here, and one HTML page with pictures, readable offline.

    Args:
        run: Folder of the run (--run.dir).
        out: Page to write; RUN/report.html if not given.
    """
    from txl_dist.ops.report import write_report

    say("\n".join(write_report(run, out=out)))


def compare(runs: Positional[tuple[Path, ...]], /, out: Path = Path("compare.html")) -> None:
    """Show several runs side by side: settings that differ, figures, loss curves; lines here, and one HTML page.

    Args:
        runs: Folders of the runs.
        out: Page to write.
    """
    from txl_dist.ops.compare import write_comparison

    say("\n".join(write_comparison(runs, out=out)))
