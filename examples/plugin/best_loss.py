"""A callback in a script: notes the best validation loss, and says at the end at which step it was.

python best_loss.py CONFIG.toml
deepspeed --no_local_rank best_loss.py CONFIG.toml
torchrun --nproc_per_node 2 best_loss.py CONFIG.toml
"""

import sys
from collections.abc import Mapping
from typing import Any

import txl_dist
from txl_dist.errors import TxlError
from txl_dist.train.callbacks import RunResult, TrainStart, ValidationEnd


class BestLoss(txl_dist.Callback):
    """Remembers the step of the best validation, also after a resume."""

    def __init__(self) -> None:
        self.rank = 0
        self.best_loss, self.best_step = float("inf"), 0

    def on_train_start(self, start: TrainStart) -> None:
        self.rank = start.rank

    def on_validation_end(self, end: ValidationEnd) -> None:
        if end.loss < self.best_loss:
            self.best_loss, self.best_step = end.loss, end.step

    def on_train_end(self, result: RunResult) -> None:
        if self.rank == 0:
            print(f"best validation loss {self.best_loss:.4f} at step {self.best_step} of {result.steps}")

    def state_dict(self) -> Mapping[str, Any]:
        return {"best_loss": self.best_loss, "best_step": self.best_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_loss, self.best_step = state["best_loss"], state["best_step"]


if __name__ == "__main__":
    try:
        result = txl_dist.pretrain(sys.argv[1], callbacks=[BestLoss()])
    except TxlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(result.exit_code)
