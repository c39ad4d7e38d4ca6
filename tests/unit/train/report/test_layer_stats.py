"""Statistics of layers cost nothing if they are not enabled."""

from typing import Any

import pytest
import torch

from txl_dist.train.report.layer_stats import NOTHING, _part_of, measure_layer_stats


class Forbidden:
    """An engine, or a micro-batch, that may not be touched."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


@pytest.mark.parametrize(("every", "step"), [(0, 10), (7, 10)])
def test_a_step_that_is_not_asked_runs_nothing(every: int, step: int) -> None:
    forbidden: Any = Forbidden()
    stats = measure_layer_stats(
        forbidden,
        [forbidden],
        [forbidden],
        step=step,
        accuracy_every=every,
        norms_every=every,
        device=torch.device("cpu"),
    )
    assert stats == NOTHING


def test_every_parameter_belongs_to_a_layer_or_to_a_part_beside_them() -> None:
    names = ("blocks.3.ff_in.weight", "residuals.1.scales", "embedding.weight_0", "softmax.bias_1", "final_norm.weight")
    assert [_part_of(name) for name in names] == ["3", "1", "embedding", "softmax", "final_norm"]
