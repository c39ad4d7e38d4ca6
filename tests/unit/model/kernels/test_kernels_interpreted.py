"""The kernels compute the same as the plain function, in Triton's interpreter without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest


def obstacle() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return "this triton's interpreter needs numpy < 2.4" if triton < (3, 9) and numpy >= (2, 4) else None


pytestmark = [pytest.mark.slow, pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))]

ROOT = Path(__file__).parents[4]
EVERY_RUN = ["odd", "one_token", "no_memory", "empty_memory", "borders", "window", "dropout"]
NIGHTLY = [
    *("nvidia_base_shape", "one_token_after_memory", "whole_eights", "many_tiles", "large_tiles"),
    *("large_tiles_of_one_document", "window_over_many_tiles", "window_longer_than_memory"),
]
"""Cases that take the interpreter longer."""
FP32 = [*EVERY_RUN, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)]
FOUND = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> FOUND:
    """What each check found, all from one process: starting one costs more than most checks."""
    is_nightly = any(item.get_closest_marker("nightly") for item in request.session.items)
    names = [
        *EVERY_RUN,
        *(NIGHTLY if is_nightly else []),
        "bf16",
        "dropout_rates",
        "recomputed",
        "softmax_errors",
        "weighted_losses",
        "multiplied_errors",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.model.kernels.interpreted", *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: values for line in done.stdout.splitlines() for name, values in json.loads(line).items()}


@pytest.mark.parametrize("name", FP32)
def test_context_and_all_gradients_are_those_of_the_twin(found: FOUND, name: str) -> None:
    assert found[name].keys() - {"of_products", "kept_scores"} == {
        *("context", "query", "key_value", "distance", "content_bias", "position_bias"),
    }
    assert {output: error for output, error in found[name].items() if not error < 1e-6} == {}


def test_products_that_lie_apart_are_attended_to_as_one(found: FOUND) -> None:
    differences = [values["of_products"] for values in found.values() if "of_products" in values]
    assert len(differences) >= 2
    assert set(differences) == {0.0}


def test_distance_scores_that_are_kept_change_no_bit(found: FOUND) -> None:
    differ = [values["kept_scores"] for values in found.values() if "kept_scores" in values]
    assert len(differ) >= 4
    assert set(differ) == {0.0}
    assert found["recomputed"]["second_pass"] == 0.0


def test_in_bf16_they_differ_by_its_rounding(found: FOUND) -> None:
    """8 bits of mantissa: 2e-3 from one rounding, and a few one after the other."""
    assert {output: error for output, error in found["bf16"].items() if not error < 2e-2} == {}


def test_dropout_keeps_the_rate_everywhere_and_differs_between_lanes_and_heads(found: FOUND) -> None:
    rates = found["dropout_rates"]
    assert rates["all"] == pytest.approx(0.85, abs=0.005)
    # A column of all lanes and heads is 1024 drawings: a standard deviation is 0.011.
    assert rates["least"] > 0.78
    assert rates["most"] < 0.92
    assert rates["least_alike"] == pytest.approx(0.85**2 + 0.15**2, abs=0.01)
    assert rates["most_alike"] == pytest.approx(0.85**2 + 0.15**2, abs=0.01)


def test_recomputation_makes_the_same_dropout_again(found: FOUND) -> None:
    assert found["recomputed"]["same_seed"] == 0.0
    assert found["recomputed"]["other_seed"] > 0.1


def test_logits_become_the_gradient_that_their_twin_makes(found: FOUND) -> None:
    limit = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}
    for case, error in found["softmax_errors"].items():
        _, dtype, of = case.split()
        assert error <= (0.0 if of == "padding" else 1e-6 if of == "losses" else limit[dtype]), case


def test_loss_and_every_gradient_of_an_adaptive_softmax_are_those_of_the_plain_losses(found: FOUND) -> None:
    assert len(found["weighted_losses"]) > 10
    assert {name: error for name, error in found["weighted_losses"].items() if not error <= 1e-6} == {}


def test_a_gradient_is_multiplied_in_fp32_and_rounded_once(found: FOUND) -> None:
    one_unit = {"bfloat16 2.6": 2**-7}  # the interpreter cuts bf16 off where a GPU rounds
    assert len(found["multiplied_errors"]) == 6
    for case, error in found["multiplied_errors"].items():
        assert error <= one_unit.get(case, 0.0), case
