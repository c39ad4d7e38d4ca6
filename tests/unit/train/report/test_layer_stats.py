"""What nobody asks for costs nothing."""

from typing import Any

import pytest
import torch

from tests.helpers.jobs import job_of
from tests.helpers.tiny import tiny_config
from txl_dist.distributed.collectives import RankInfo
from txl_dist.train.report.layer_stats import NOTHING, _part_of, measure_layer_stats


class Forbidden:
    """An engine, or a micro-batch, that may not be touched."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


@pytest.mark.parametrize(("every", "step"), [(0, 10), (7, 10)])
def test_a_step_that_is_not_asked_runs_nothing(every: int, step: int) -> None:
    config = tiny_config(metrics={"accuracy_every_steps": every, "norms_every_steps": every})
    forbidden: Any = Forbidden()
    assert (
        measure_layer_stats(
            forbidden,
            job_of(config, RankInfo(0, 1, 0, torch.device("cpu"), num_threads=1)),
            [forbidden],
            [forbidden],
            step=step,
        )
        == NOTHING
    )


def test_every_parameter_belongs_to_a_layer_or_to_a_part_beside_them() -> None:
    names = ("blocks.3.ff_in.weight", "residuals.1.scales", "embedding.weight_0", "softmax.bias_1", "final_norm.weight")
    assert [_part_of(name) for name in names] == ["3", "1", "embedding", "softmax", "final_norm"]
