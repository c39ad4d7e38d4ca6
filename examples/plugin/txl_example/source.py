"""Documents from an SQLite database: `txl prepare sqlite:FILE?TABLE.COLUMN`."""

import sqlite3
from collections.abc import Iterator

from txl_dist import plugins


def read(place: str) -> Iterator[str]:
    """The texts of a column, in the order of the rows."""
    file, _, column = place.partition("?")
    table, _, field = column.partition(".")
    if not (table.isidentifier() and field.isidentifier()):
        raise ValueError(f"{place!r} is not FILE?TABLE.COLUMN")
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as database:
        for (text,) in database.execute(f"SELECT {field} FROM {table} ORDER BY rowid"):
            yield text


plugins.register_source("sqlite", read)
