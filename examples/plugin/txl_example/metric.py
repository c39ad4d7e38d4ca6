"""How much text a second of training reads, in pages of 3,000 bytes."""

from collections.abc import Mapping
from typing import Any

from txl_dist import plugins


def pages_per_s(record: Mapping[str, Any]) -> float | None:
    """From the numbers of a training record; an evaluation has no such number."""
    if "tokens_per_s" not in record or not record.get("bits_per_byte"):
        return None
    bits_per_token = record["loss"] / 0.6931471805599453
    bytes_per_token = bits_per_token / record["bits_per_byte"]
    return record["tokens_per_s"] * bytes_per_token / 3000


plugins.register_metric(
    "pages_per_s",
    pages_per_s,
    form=".2f",
    label="pages/s",
    curve=plugins.Curve("Speed", "Pages of text", "pages of 3,000 bytes per second"),
)
