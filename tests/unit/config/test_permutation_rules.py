"""Settings that do not go with XLNet's objective are refused in one line: the setting, its value and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from txl_dist.config.load import check_config, config_from_dict
from txl_dist.errors import ConfigError

MODEL: dict[str, Any] = {"any_order": True}
TRAIN: dict[str, Any] = {"objective": "permutation", "segment_len": 64, "reuse_len": 32}


def refusal(sections: dict[str, dict[str, Any]]) -> str:
    """The message for XLNet's settings with these changes."""
    values = {**sections, "model": MODEL | sections.get("model", {}), "train": TRAIN | sections.get("train", {})}
    with pytest.raises(ConfigError) as caught:
        check_config(config_from_dict(values, source="a test"))
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_the_settings_of_the_paper_are_accepted() -> None:
    lengths = {"segment_len": 512, "reuse_len": 256, "memory_len": 384, "predicted_len": 85, "order_len": 256}
    check_config(config_from_dict({"model": MODEL, "train": TRAIN | lengths}, source="a test"))


@pytest.mark.parametrize(
    ("train", "setting", "remedy"),
    [
        ({"reuse_len": 65}, "train.reuse_len=65 must not exceed train.segment_len=64", "lower train.reuse_len, or set"),
        ({"predicted_len": 64}, "train.predicted_len=64 predicts 32 of the 32 tokens", "lower train.predicted_len, or"),
        ({"predicted_len": 63}, "train.predicted_len=63 predicts 32 of the 32 tokens", "lower train.predicted_len, or"),
        ({"order_len": 20}, "train.order_len=20 must divide the 32 tokens", "set train.order_len to 0 for one order"),
        ({"order_len": 64}, "train.order_len=64 must divide the 32 tokens", "or to a divisor of its length"),
        ({"segment_len": 1, "reuse_len": 0}, "train.segment_len=1, train.reuse_len=1", "or raise train.segment_len"),
    ],
)
def test_lengths_that_do_not_fit_together_are_refused_once(train: dict[str, Any], setting: str, remedy: str) -> None:
    message = refusal({"train": train})
    assert message.count(setting) == 1, "both halves have the same problem"
    assert remedy in message


@pytest.mark.parametrize(
    ("section", "values", "remedy"),
    [
        ("train", {"half_loss": True}, "set half_loss to false"),
        ("model", {"positions": "learned_relative", "num_distances": 192}, "set model.positions to 'relative' (is 'l"),
        ("model", {"same_length": "memory"}, "set model.same_length to 'off' (is 'memory')"),
        ("model", {"value_residual": True}, "set model.value_residual to false"),
        ("engine", {"cuda_graph": "auto"}, "set engine.cuda_graph to 'off'"),
        ("engine", {"cuda_graph": "on"}, "engine.cuda_graph='on' needs train.objective='next'"),
        ("engine", {"attention": "triton"}, "set engine.attention to 'auto' or 'fused'"),
        ("eval", {"segment_len": 32}, "eval.segment_len=32 must be train.segment_len=64"),
        ("eval", {"max_tokens": 64}, "eval.max_tokens=64 is less than a segment"),
        ("eval", {"max_tokens": 64}, "set eval.max_tokens to 0, or to 65 or more"),
        ("eval", {"overlap_len": 4, "memory_len": 0}, "eval.overlap_len=4 needs train.objective='next'"),
        ("metrics", {"sample_every_steps": 5}, "metrics.sample_every_steps=5 needs a model that predicts the next"),
        ("model", {"any_order": False}, "set objective to 'permutation' and any_order to true (XLNet)"),
        ("train", {"objective": "next", "reuse_len": 0}, "or objective to 'next' and any_order to false"),
    ],
)
def test_a_setting_that_needs_the_next_token_is_refused(section: str, values: dict[str, Any], remedy: str) -> None:
    assert remedy in refusal({section: values})


def test_absolute_positions_are_refused() -> None:
    message = refusal({"model": {"positions": "absolute"}, "train": {"memory_len": 0}})
    assert message.startswith("model.any_order=True needs the encodings of negative distances")
    assert "set model.positions to 'relative' (is 'absolute')" in message


def test_lengths_of_the_objective_are_refused_for_the_next_token() -> None:
    with pytest.raises(ConfigError, match=r"need train\.objective='permutation': set these lengths to 0"):
        check_config(config_from_dict({"train": {"reuse_len": 32}}, source="a test"))
    with pytest.raises(ConfigError, match=r"set model\.segment_terms to false"):
        check_config(config_from_dict({"model": {"segment_terms": True}}, source="a test"))
