"""Predict the loss of a model before it is trained, from three smaller models.

    python -m tools.experiments.studies sizes --corpus data/stdlib    train the smaller models, three seeds each
    python -m tools.experiments.prediction --tell          write notebook/prediction.csv. Commit it before the next step
    python -m tools.experiments.studies larger --corpus data/stdlib  train the larger model
    python -m tools.experiments.prediction --table         write the table of notebook/results.md

The law is the simplest one: a line through the logarithms of the loss and of the parameters outside the tables, at
equal tokens and the same learning rate. It is fitted by least squares for each seed. The prediction is the mean over
the seeds with their standard deviation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.experiments.recording import (
    NOTEBOOK,
    append_rows,
    commit,
    markdown,
    put_table,
    read_rows,
    spread,
    today,
)
from tools.experiments.studies import RECORDS as STUDIED
from tools.experiments.studies import STUDIES, Record, config_of, groups_of, parameters_outside_tables, told_on
from txl_dist.errors import ConfigError, TxlError

RECORDS, PAGE = NOTEBOOK / "prediction.csv", NOTEBOOK / "results.md"
BEGIN = "<!-- table: python -m tools.experiments.prediction --table -->"
_HEAD = ("corpus", "seeds", "from models of, parameters", "for, parameters", "told", "came", "told on, at")


class Prediction(NamedTuple):
    """Prediction for one corpus, which is a row of the records."""

    corpus: str
    """Name of the corpus' group in the study of sizes (see `groups_of`)."""
    seeds: int
    smaller: str
    """Numbers of parameters of the smaller models, outside the tables."""
    parameters: int
    """Number of parameters of the larger model, outside the tables."""
    nats: float
    deviation: float
    commit: str
    date: str


def told(points: Sequence[tuple[int, float]], *, parameters: int) -> float:
    """Return the predicted loss of a model, from a line through the logarithms of (parameters, loss) of other
    models."""
    sizes, losses = np.log(np.array(points)).T
    slope, offset = np.polyfit(sizes, losses, 1)
    return float(np.exp(offset + slope * np.log(parameters)))


def predict(records: Sequence[Record], *, parameters: int, settled: Collection[str] = ()) -> list[Prediction]:
    """Return a prediction for each corpus of the study of sizes that is not in `settled`. Raises ConfigError if there
    are fewer than two seeds of all sizes."""
    smaller, found = list(STUDIES["sizes"].variants), []
    for corpus, group in _measured(records).items():
        if corpus in settled:
            continue
        by_seed: dict[int, dict[str, Record]] = {}
        for row in group:
            by_seed.setdefault(row.seed, {})[row.variant] = row
        whole = [rows for rows in by_seed.values() if rows.keys() == set(smaller)]
        if len(whole) < 2:
            raise ConfigError(f"{corpus}: the study of sizes has fewer than two seeds of {', '.join(smaller)}.")
        losses = [told([(row.parameters, row.nats) for row in rows.values()], parameters=parameters) for rows in whole]
        sizes = " ".join(str(whole[0][name].parameters) for name in smaller)
        mean, deviation = round(statistics.fmean(losses), 4), round(statistics.stdev(losses), 4)
        found.append(Prediction(corpus, len(whole), sizes, parameters, mean, deviation, commit(), today()))
    return found


def settled_of(records: Sequence[Record], predictions: Sequence[Prediction]) -> dict[str, str]:
    """Return the corpora for which no new prediction can be made, with the reason."""
    known = {one.corpus for one in predictions}
    trained = {told_on(row) for row in records if row.study == "larger"}
    found = {}
    for corpus, group in _measured(records).items():
        if corpus in known:
            found[corpus] = f"{RECORDS} has its prediction already, which does not change"
        elif told_on(group[0]) in trained:
            found[corpus] = "the larger model is trained already, so its loss cannot be predicted any more"
    return found


def _measured(records: Sequence[Record]) -> dict[str, list[Record]]:
    return groups_of([row for row in records if row.study == "sizes"])


def table_of(predictions: Sequence[Prediction], records: Sequence[Record]) -> list[str]:
    """Return the Markdown table, a row per prediction."""
    lines, groups = [], _measured(records)
    for one in predictions:
        about = {told_on(row) for row in groups.get(one.corpus, [])}
        came = [row.nats for row in records if row.study == "larger" and told_on(row) in about]
        cells = [one.corpus, str(one.seeds), one.smaller.replace(" ", ", "), str(one.parameters)]
        cells += [f"{one.nats:.4f} +- {one.deviation:.4f}", spread(came, digits=4) if came else "not yet trained"]
        lines.append([*cells, f"{one.date}, {one.commit}"])
    return markdown(_HEAD, lines)


def main() -> None:
    """Write the predictions, or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tell",
        action="store_true",
        help="write predictions to notebook/prediction.csv, for corpora whose larger model is not yet trained",
    )
    parser.add_argument("--table", action="store_true", help="write the table of notebook/results.md")
    arguments = parser.parse_args()
    records = read_rows(STUDIED, Record)
    if arguments.tell:
        (variant,) = STUDIES["larger"].variants
        larger = config_of(STUDIES["larger"], variant, corpus=Path(), vocab_size=100_000, seed=1, steps=1, place=Path())
        if not _measured(records):
            raise ConfigError(
                "the study of sizes has no records: python -m tools.experiments.studies sizes --corpus DIR."
            )
        settled = settled_of(records, read_rows(RECORDS, Prediction))
        reasons = [f"{corpus}: {why}." for corpus, why in settled.items()]
        if settled.keys() == _measured(records).keys():
            raise ConfigError(" ".join([*reasons, "Run the study of sizes for another corpus."]))
        new = predict(records, parameters=parameters_outside_tables(larger), settled=settled)
        append_rows(RECORDS, Prediction._fields, new)
        print(*reasons, *new, sep="\n")
    elif arguments.table:
        put_table(PAGE, BEGIN, table_of(read_rows(RECORDS, Prediction), records))
    else:
        parser.error("type --tell or --table")


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"prediction: {error}")
