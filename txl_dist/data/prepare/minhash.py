"""MinHash signatures of documents by the package rensa, and the bands by which similar documents are found.

The similarity of two documents is the Jaccard similarity of their sets of runs (sequences of consecutive token ids,
duplicates.py). Each of the 128 hashes of a signature is equal in both documents with a probability of this similarity.
So the share of equal hashes estimates the similarity with a standard error of at most 0.044.

A band is a tuple of r hashes of a signature. Documents that agree in a band are compared with each other. Two documents
of similarity J agree in one of 128 // r bands with probability 1 - (1 - J^r)^(128 // r). r is the largest number with
which this probability is at least 0.99 at the threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from txl_dist.data.loader.lanes import hash64
from txl_dist.data.prepare.duplicates import hashed_runs, run_len_of

Signatures = npt.NDArray[np.uint32]
"""[documents, NUM_HASHES] array. Each row is the signature of a document."""

NUM_HASHES = 128
BAND_ENTRY = np.dtype([("value", "<u8"), ("row", "<u4")])
"""Entry of one band of a document: a hash of the band, and the row of the document in its part."""
_SEED = 1
_LEAST_RECALL = 0.99
_CHUNK = 1 << 18
"""Number of runs whose hashes are in host memory at once."""
_NO_RUN = np.uint32(2**32 - 1)
"""Value of all hashes of a document without a run."""


def rows_of_bands(threshold: float) -> int:
    """Return the number of hashes in a band, for documents whose similarity is at least `threshold`."""
    for num_rows in range(NUM_HASHES, 1, -1):
        num_bands = NUM_HASHES // num_rows
        if 1 - (1 - threshold**num_rows) ** num_bands >= _LEAST_RECALL:
            return num_rows
    return 1


def sign(documents: Sequence[npt.NDArray[Any]], *, kind: str) -> Signatures:
    """Return the signatures of documents, which are arrays of token ids.

    `kind` is the kind of tokenizer, which sets the length of a run. A document shorter than a run has the largest value
    in all its hashes.
    """
    import rensa

    signatures = np.full((len(documents), NUM_HASHES), _NO_RUN)
    for owners, runs in hashed_runs(documents, run_len=run_len_of(kind), chunk=_CHUNK):
        if not len(runs):
            continue
        signed, firsts = np.unique(owners, return_index=True)
        borders = np.append(firsts, len(owners)).astype(np.uint64)
        matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(runs, borders, NUM_HASHES, _SEED)
        rows = np.array(matrix.to_rows(), dtype=np.uint32)
        # The signature of a set is the smallest value in each place of the signatures of its parts.
        signatures[signed] = np.minimum(signatures[signed], rows)
    return signatures


def band_table(signatures: Signatures, *, num_rows: int) -> npt.NDArray[Any]:
    """Return the `BAND_ENTRY` of each band of each document, sorted by value. Documents without a run have none."""
    has_runs = (signatures != _NO_RUN).any(axis=1)
    rows = np.flatnonzero(has_runs)
    num_bands = NUM_HASHES // num_rows
    table = np.empty((num_bands, len(rows)), dtype=BAND_ENTRY)
    for band in range(num_bands):
        first = band * num_rows
        values = np.full(len(rows), band, dtype=np.uint64)
        for column in range(first, first + num_rows):
            values = hash64(values ^ signatures[rows, column])
        table[band]["value"] = values
        table[band]["row"] = rows
    flat = table.reshape(-1)
    order = np.lexsort((flat["row"], flat["value"]))
    return flat[order]
