"""Generation: which tokens sampling can choose, and that a cache of keys and values changes only the cost."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch

from tests.helpers.models import generated, random_tokens, tiny_model
from txl_dist.errors import ConfigError
from txl_dist.inference.options import Sampling, SamplingParams
from txl_dist.inference.probe import log_probabilities
from txl_dist.inference.sampling import choose, uniform_numbers
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import TransformerXL

VARIANTS: dict[str, dict[str, Any]] = {
    "post_norm": {},
    "pre_norm": {"pre_norm": True, "final_norm": True},
    "adaptive": {"cutoffs": (5, 20), "div_value": 2},
    "clamped": {"clamp_len": 6},
    "learned": {"positions": "learned_relative", "num_distances": 30, "value_bias": True, "output_bias": True},
    "learned_far": {"positions": "learned_relative", "num_distances": 7, "activation": "gelu"},
}


def drawn(log_p: torch.Tensor, *, count: int = 400, seed: int = 0, **changes: Any) -> Counter[int]:
    values: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **changes}
    uniform_B2 = torch.from_numpy(uniform_numbers(seed).random((count, 2)))
    return Counter(choose(log_p.expand(count, -1), uniform_B2, Sampling(**values)).tolist())


@pytest.fixture
def log_p() -> torch.Tensor:
    p_V = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    return p_V.log()


def test_greedy_and_the_narrowest_limits_take_the_likeliest(log_p: torch.Tensor) -> None:
    for limits in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-3}):
        assert drawn(log_p, count=50, **limits).keys() == {1}, limits


def test_sampling_follows_the_probabilities(log_p: torch.Tensor) -> None:
    counts = drawn(log_p, count=4000)
    for token, p in enumerate(log_p.exp().tolist()):
        # Five standard deviations of a binomial count.
        assert abs(counts[token] - 4000 * p) <= 5 * (4000 * p * (1 - p)) ** 0.5


def test_rounding_of_many_probabilities_changes_next_to_no_draw() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p_BV = torch.randn(200, 4_096, generator=generator).mul(2).log_softmax(-1)
    rounded_BV = log_p_BV + 1e-4 * torch.rand(log_p_BV.shape, generator=generator)
    limits, numbers = Sampling(temperature=1.0, top_k=0), uniform_numbers(0)
    draws = [torch.from_numpy(numbers.random((200, 2))) for _ in range(20)]
    changed = sum(int((choose(log_p_BV, u, limits) != choose(rounded_BV, u, limits)).sum()) for u in draws)
    assert changed <= 6, "of 4,000; with one border for each token they were 13"


def test_the_largest_random_number_draws_no_token_whose_probability_is_0() -> None:
    p_BV = torch.rand(20_000, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p_BV[:, 17:] = 0
    uniform_B2 = torch.full((len(p_BV), 2), 1 - 2.0**-53, dtype=torch.float64)
    assert set(choose(p_BV.log(), uniform_B2, Sampling(temperature=1.0, top_k=0)).tolist()) == {16}


def test_limits_keep_the_likeliest_tokens_only(log_p: torch.Tensor) -> None:
    assert drawn(log_p, top_k=2).keys() == {1, 3}
    assert drawn(log_p, top_k=99).keys() == {0, 1, 2, 3, 4}
    assert drawn(log_p, top_p=0.39).keys() == {1}
    assert drawn(log_p, top_p=0.5).keys() == {1, 3}
    assert drawn(log_p, top_p=0.8).keys() == {1, 3, 4}
    assert drawn(log_p, top_k=3, top_p=0.5).keys() == {1, 3}
    assert drawn(log_p, top_p=1.0).keys() == {0, 1, 2, 3, 4}


def test_temperature_sharpens_and_flattens(log_p: torch.Tensor) -> None:
    cold, warm, hot = (drawn(log_p, count=2000, temperature=value)[1] for value in (0.5, 1.0, 4.0))
    assert cold > warm > hot


def run(model: TransformerXL, prompt: list[int], **changes: Any) -> list[int]:
    values: dict[str, Any] = {"max_tokens": 20, "segment_len": 8, "memory_len": 64, "temperature": 0.0}
    return generated(model, prompt, **{**values, **changes})


def test_generation_follows_from_the_seed() -> None:
    model = tiny_model().eval()
    prompt = random_tokens(5).tolist()
    one, same, other = (run(model, prompt, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    torch.manual_seed(123)
    assert run(model, prompt, temperature=1.0, seed=1) == one, "torch's own generator plays no part"


@pytest.mark.parametrize(
    "values",
    [
        *({"temperature": -0.1}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}),
        *({"min_p": 1.5}, {"repetition_penalty": 0.5}, {"max_tokens": -1}, {"seed": -1}, {"stop": ("a", "")}),
        *({"num_samples": 0}, {"batch_size": 0}, {"log_probs": -2}, {"memory_len": -2}, {"allowed": (3, 50)}),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    flag = next(iter(values)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{flag}"):
        SamplingParams(**values).check(vocab_size=50)


def test_a_misspelt_setting_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'temperatur'\. Did you mean temperature\?"):
        SamplingParams.of({"temperatur": 0.5})


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt_len", [1, 8, 21])
@pytest.mark.parametrize("name", VARIANTS)
def test_generating_with_a_cache_is_rerunning_the_whole_text(name: str, prompt_len: int, temperature: float) -> None:
    model = tiny_model(dtype=torch.float64, **VARIANTS[name]).eval()
    prompt = random_tokens(prompt_len).tolist()
    text, numbers, limits = list(prompt), uniform_numbers(0), Sampling(temperature=temperature, top_k=0)
    with torch.no_grad():
        for _ in range(20):
            hidden, _ = model(torch.tensor([text]), model.empty_memory(num_lanes=1, memory_len=0))
            log_p_1V = model.softmax.log_probabilities(hidden[:, -1])
            text.append(int(choose(log_p_1V, torch.from_numpy(numbers.random((1, 2))), limits)))
    for segment_len in (1, 8, 50):
        assert run(model, prompt, segment_len=segment_len, temperature=temperature) == text[prompt_len:]
    if temperature:  # the likeliest token of a random network is often the same for ever
        assert len(set(text[prompt_len:])) > 5


def test_absolute_positions_generate_from_a_segment_that_is_run_anew_for_each_token() -> None:
    model = tiny_model(dtype=torch.float64, positions="absolute").eval()
    text = random_tokens(5).tolist()
    generated = run(model, text, temperature=1.0)
    numbers, limits = uniform_numbers(0), Sampling(temperature=1.0, top_k=0)
    with torch.no_grad():
        for _ in range(20):
            window = torch.tensor([text[-8:]])
            hidden, _ = model(window, model.empty_memory(num_lanes=1, memory_len=0))
            log_p_1V = model.softmax.log_probabilities(hidden[:, -1])
            text.append(int(choose(log_p_1V, torch.from_numpy(numbers.random((1, 2))), limits)))
    assert generated == text[5:]


def test_generation_ends_before_the_stop_token_and_at_the_limit() -> None:
    model = tiny_model().eval()
    whole = run(model, [3], temperature=1.0, max_tokens=30)
    assert len(whole) == 30
    stop = whole[12]
    expected = list(itertools.takewhile(lambda token: token != stop, whole))
    assert run(model, [3], temperature=1.0, max_tokens=30, stop_at=stop) == expected


def test_scores_may_begin_with_zeros_that_are_attended() -> None:
    model = tiny_model(dtype=torch.float64).eval()
    tokens_BS = random_tokens(2, 13)
    empty = log_probabilities(model, tokens_BS, segment_len=4, memory_len=9)
    zeros = log_probabilities(model, tokens_BS, segment_len=4, memory_len=9, zero_memory=True)
    hidden_LBMD = torch.zeros(3, 2, 9, 12, dtype=torch.float64)
    memory = Memory(tuple(hidden_LBMD), torch.zeros(2, 9, dtype=torch.int64))
    with torch.no_grad():
        hidden_BTD, _ = model(tokens_BS[:, :4], memory)
        expected = -model.softmax(hidden_BTD, tokens_BS[:, 1:5])
    assert (zeros[:, :4] - expected).abs().max() == 0
    assert (zeros - empty)[:, :4].abs().max() > 1e-3


def test_scores_do_not_depend_on_the_segment_length_while_the_memory_holds_the_text() -> None:
    model = tiny_model(dtype=torch.float64).eval()
    tokens_BS = random_tokens(2, 23)
    scores = [log_probabilities(model, tokens_BS, segment_len=length, memory_len=22) for length in (1, 5, 22, 99)]
    assert scores[0].shape == (2, 22)
    assert all((other - scores[0]).abs().max() <= 1e-10 for other in scores[1:])
    assert (scores[0] < 0).all()
