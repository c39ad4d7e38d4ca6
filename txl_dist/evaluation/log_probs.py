"""Writer of a file with the log-probability of each token that an evaluation scored, in the order of the corpus."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from txl_dist.data.loader.evaluation import EvalStream
from txl_dist.data.loader.shards import Split
from txl_dist.distributed.collectives import all_reduce_sum
from txl_dist.io.files import write_output
from txl_dist.model.transformer_xl import Batch

_NOT_SCORED = float("inf")


class LogProbs:
    """Log-probabilities of all targets of a split, which an evaluation adds segment by segment.

    Every rank has space for all targets of the split, which takes four bytes per target.
    """

    def __init__(self, stream: EvalStream) -> None:
        self._stream = stream
        self._position = 0  # in tokens from the start of each lane
        self._log_p_N = torch.zeros(stream.num_targets)

    def add(self, batch: Batch, nll_BT: Tensor) -> None:
        """Add the losses of the next segment, in nats. `batch` is the segment, and says which targets are scored."""
        stream = self._stream
        length = min(stream.segment_len, stream.stripe_len - self._position)
        values_BT = torch.where(batch.scored_BT > 0, -nll_BT.float(), _NOT_SCORED)
        values_BT = values_BT[:, -stream.segment_len :].cpu()  # without the overlap that is run again
        for lane, values_T in zip(stream.lanes, values_BT, strict=True):
            begin = lane * stream.stripe_len + self._position
            stop = min(begin + length, (lane + 1) * stream.stripe_len, stream.num_targets)
            if begin < stop:
                self._log_p_N[begin:stop] = values_T[: stop - begin]
        self._position += stream.segment_len

    def joined(self) -> Tensor:
        """Combine the log-probabilities of all ranks and return log_p_N in nats. All ranks call this method.

        The value is inf for a target that was not scored.
        """
        return all_reduce_sum(self._log_p_N)  # each target belongs to one rank, and the others have 0 there


def write_log_probs(path: Path, split: Split, log_p_N: Tensor) -> None:
    """Write a file with the log-probability of each scored token. Raises OSError if the file cannot be written.

    The file's columns are `token` (the id), `log_p` (nats) and `document` (number in the split). An .npz file has the
    columns as arrays. Any other file has one JSON object per line. The file's content is built in memory as a whole.
    """
    log_p = log_p_N.numpy()
    is_scored = log_p != _NOT_SCORED
    document_lens = [len(document) for document in split.each_document()]
    documents = np.repeat(np.arange(split.documents), document_lens)
    columns = {
        "token": split.read_all()[1:][is_scored],
        "log_p": log_p[is_scored],
        "document": documents[1:][is_scored],
    }
    if path.suffix == ".npz":
        stream = io.BytesIO()
        np.savez(stream, allow_pickle=False, **columns)
        write_output(path, stream.getvalue())
        return
    lines = []
    for row in zip(*(values.tolist() for values in columns.values()), strict=True):
        values = dict(zip(columns, row, strict=True))
        lines.append(json.dumps(values) + "\n")
    write_output(path, "".join(lines).encode())
