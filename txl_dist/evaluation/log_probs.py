"""The log-probability of each token that an evaluation scored, in the order of the corpus, in a file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from txl_dist.data.loader.corpus import Split
from txl_dist.data.loader.evaluation import EvalStream
from txl_dist.distributed.collectives import all_reduce_sum
from txl_dist.io.files import write_output
from txl_dist.model.transformer_xl import Batch

_NOT_SCORED = float("inf")


class LogProbs:
    """log p of the targets of a split, filled segment by segment: four bytes for each of them, on every rank."""

    def __init__(self, stream: EvalStream) -> None:
        self._stream, self._position = stream, 0
        self._log_p_N = torch.zeros(stream.num_targets)

    def add(self, batch: Batch, nll_BT: Tensor) -> None:
        """The losses of the next segment."""
        stream = self._stream
        length = min(stream.segment_len, stream.stripe_len - self._position)
        values_BT = torch.where(batch.scored_BT > 0, -nll_BT.float(), _NOT_SCORED)[:, -stream.segment_len :].cpu()
        for lane, values_T in zip(stream.lanes, values_BT, strict=True):
            begin = lane * stream.stripe_len + self._position
            stop = min(begin + length, (lane + 1) * stream.stripe_len, stream.num_targets)
            if begin < stop:
                self._log_p_N[begin:stop] = values_T[: stop - begin]
        self._position += stream.segment_len

    def joined(self) -> Tensor:
        """log_p_N of all ranks, which call it together; inf where a target was not scored."""
        return all_reduce_sum(self._log_p_N)  # each target belongs to one rank, the others have 0 there


def write_log_probs(path: Path, split: Split, log_p_N: Tensor) -> None:
    """Arrays `token`, `log_p` (nats) and `document` (number in the split) of an .npz file, or a JSON object per line
    with these keys; a row per scored token. Builds the whole file in memory. Raises OSError.
    """
    log_p = log_p_N.numpy()
    is_scored = log_p != _NOT_SCORED
    documents = np.repeat(np.arange(split.documents), [len(document) for document in split.each_document()])
    columns = {"token": split.read_all()[1:], "log_p": log_p, "document": documents[1:]}
    columns = {name: values[is_scored] for name, values in columns.items()}
    if path.suffix == ".npz":
        stream = io.BytesIO()
        np.savez(stream, allow_pickle=False, **columns)
        write_output(path, stream.getvalue())
        return
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    lines = (json.dumps(dict(zip(columns, row, strict=True))) for row in rows)
    write_output(path, "".join(f"{line}\n" for line in lines).encode())
