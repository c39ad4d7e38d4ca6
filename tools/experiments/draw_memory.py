"""Draw the picture of README: the effect of the memory, from two runs that differ only in train.memory_len.

    txl prepare stdlib --out data/stdlib --vocab-size 4096
    txl train configs/quickstart.toml --run.dir runs/memory --eval.every_steps 60 --eval.max_tokens 40000
    txl train configs/quickstart.toml --run.dir runs/no_memory --eval.every_steps 60 --eval.max_tokens 40000 \\
        --train.memory_len 0
    python -m tools.experiments.draw_memory runs/memory runs/no_memory --out docs/memory.svg      some seconds

The left diagram shows the validation loss over the steps. The right diagram shows the loss at the end by position in
the segment. Without memory the first tokens of every segment are predicted without context.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tools.experiments.recording import picture

COLOURS = ("#2f7ed8", "#d9680f")


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's evaluations, in order."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["kind"] == "eval"]


def draw(runs: dict[str, list[dict[str, Any]]], *, segment_len: int, out: Path) -> None:
    """Write the picture as an SVG file. `runs` has the records of the evaluations by label."""
    with picture(out, width=8.4, height=3.1) as figure:
        curves, positions = figure.subplots(1, 2)
        for (label, rows), colour in zip(runs.items(), COLOURS, strict=True):
            last = rows[-1]
            curves.plot([row["step"] for row in rows], [row["loss"] for row in rows], color=colour, label=label)
            curves.annotate(
                f"{last['loss']:.3f}",
                (last["step"], last["loss"]),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=colour,
                annotation_clip=False,
            )
            losses = last["loss_by_position"]
            width = segment_len / len(losses)
            positions.plot([(index + 0.5) * width for index in range(len(losses))], losses, color=colour, label=label)
        curves.set(xlabel="step", ylabel="validation loss, nats per token")
        positions.set(xlabel="position in the segment, tokens", ylabel="validation loss, nats per token")
        curves.set_xlim(right=curves.get_xlim()[1] + 60)  # room for the numbers
        curves.legend()


def main() -> None:
    """Read two runs and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path, help="run with memory, and run without memory")
    parser.add_argument("--segment-len", type=int, default=64, help="train.segment_len of the runs")
    parser.add_argument("--out", type=Path, default=Path("docs/memory.svg"), help="picture to write")
    arguments = parser.parse_args()
    labels = ("with memory", "without memory")
    runs = {label: evaluations(run) for label, run in zip(labels, arguments.runs, strict=True)}
    draw(runs, segment_len=arguments.segment_len, out=arguments.out)


if __name__ == "__main__":
    main()
