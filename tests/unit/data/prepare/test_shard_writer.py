"""The bytes of a shard never change, and webdataset's own writer would write the same."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import webdataset

from txl_dist.data.format import npy_bytes
from txl_dist.data.prepare.shard_writer import write_shard

DTYPE = np.dtype("<u2")


def test_a_shard_has_the_bytes_that_webdatasets_writer_gives_and_that_it_always_had(tmp_path: Path) -> None:
    lengths = (3, 5000, 40, 4096, 7, 2)
    documents = [np.arange(length, dtype=DTYPE) % 300 for length in lengths]
    info = write_shard(tmp_path, "a.tar", documents, first_document=12, dtype=DTYPE, vocab_size=300).info
    sink = io.BytesIO()
    with webdataset.TarWriter(sink, encoder=False, mtime=0) as writer:
        for number, sample in ((12, [0]), (13, [1]), (14, [2]), (15, [3]), (16, [4, 5])):
            key = f"{number:09d}"
            tokens = np.concatenate([documents[index] for index in sample])
            writer.write({"__key__": key, "npy": npy_bytes(tokens)})
            if len(sample) > 1:
                writer.write({"__key__": key, "docs.npy": npy_bytes(np.array([0, 7], dtype="<u4"))})
    content = (tmp_path / "a.tar").read_bytes()
    assert content == sink.getvalue()
    assert (
        hashlib.sha256(content).hexdigest()
        == info.sha256
        == "20d444919f8274dcfa4c6fbb6e3756562a676114057114c59d1b3301a09fef6c"
    )
