"""Every generation setting of a task of the harness is used, has no effect, or is reported as unused."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from txl_dist.inference.lm_eval_settings import MOST_NEW_TOKENS, read_generation_settings
from txl_dist.inference.options import SamplingParams

GREEDY = {"temperature": 0.0, "top_k": 0, "max_tokens": MOST_NEW_TOKENS, "stop": ()}


def used(**given: Any) -> dict[str, Any]:
    """The settings that are used, all of which must be."""
    values, unused = read_generation_settings(given)
    assert unused == []
    return values


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [3, 3.0, "3"])
def test_a_length_has_several_names(name: str, value: Any) -> None:
    assert used(**{name: value}) == {**GREEDY, "max_tokens": 3}
    assert used(**{name: None}) == GREEDY


def test_of_several_lengths_the_harnesss_own_counts() -> None:
    values, unused = read_generation_settings({"max_tokens": 9, "max_new_tokens": 5, "max_gen_toks": 5})
    assert values["max_tokens"] == 5
    assert unused == ["max_tokens=9 is not used, because max_gen_toks=5 takes precedence"]
    assert used(max_completion_tokens=7, max_new_tokens=7, max_gen_toks=None)["max_tokens"] == 7
    values, unused = read_generation_settings({"max_gen_toks": 0, "max_new_tokens": 3})
    assert values["max_tokens"] == 0
    assert unused == ["max_new_tokens=3 is not used, because max_gen_toks=0 takes precedence"]


@pytest.mark.parametrize(
    ("given", "stop"),
    [
        ({"until": None}, ()),
        ({"until": []}, ()),
        ({"until": ""}, ()),
        ({"until": "\n"}, ("\n",)),
        ({"until": ["\n", "", None, "Q:", "\n"]}, ("\n", "Q:")),
        ({"until": ["."], "stop": "a"}, (".", "a")),
        ({"stop_sequences": ["x", 7]}, ("x", "7")),
    ],
)
def test_a_text_ends_at_strings_in_every_spelling(given: dict[str, Any], stop: tuple[str, ...]) -> None:
    assert used(**given) == {**GREEDY, "stop": stop}


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.8}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.5}, 0.5),
        ({"do_sample": True, "temperature": 0}, 0.0),
        ({"do_sample": None, "temperature": 0.7}, 0.7),
        ({"do_sample": "false", "temperature": 0.7}, 0.0),
        ({"do_sample": "False"}, 0.0),
        ({"do_sample": "no"}, 0.0),
        ({"do_sample": "0"}, 0.0),
        ({"do_sample": 0, "temperature": 0.7}, 0.0),
        ({"do_sample": "true", "temperature": 0.7}, 0.7),
        ({"do_sample": " True "}, 1.0),
        ({"do_sample": "1"}, 1.0),
        ({"do_sample": "null", "temperature": 0.7}, 0.7),
        ({"temperature": 1}, 1.0),
        ({"temperature": "0.2"}, 0.2),
        ({"temperature": None}, 0.0),
    ],
)
def test_texts_are_drawn_as_the_harness_means_it(given: dict[str, Any], temperature: float) -> None:
    assert used(**given) == {**GREEDY, "temperature": temperature}


def test_other_ways_of_drawing_are_passed_on() -> None:
    values = used(do_sample=True, top_p=0.95, top_k=5, min_p=0.1, repetition_penalty=1.1, seed=3)
    assert values == {**GREEDY, "temperature": 1.0} | {
        **{"top_p": 0.95, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3}
    }
    assert used(top_k=-1)["top_k"] == 0


@pytest.mark.parametrize(
    "given",
    [
        {"num_beams": 1},
        {"num_beams": 1, "early_stopping": True, "length_penalty": 1.0, "use_cache": True},
        {"num_return_sequences": 1, "n": 1, "pad_token_id": 0, "eos_token_id": [0, 1]},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "min_new_tokens": 0, "no_repeat_ngram_size": 0},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False, "num_beams": None},
    ],
)
def test_what_changes_nothing_is_not_spoken_of(given: dict[str, Any]) -> None:
    assert used(**given) == GREEDY


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_beams": 10}, "num_beams=10 is not used, because beam search is not supported"),
        ({"max_length": 512}, "max_length=512 is not used"),
        ({"min_new_tokens": 5}, "min_new_tokens=5 is not used"),
        ({"n": 4}, "n=4 is not used"),
        ({"guided_json": {"a": [1]}}, "guided_json={'a': [1]} is not used"),
        ({"temperature": -1}, "temperature=-1 is not used, because it is out of range"),
        ({"top_p": 0}, "top_p=0 is not used, because it is out of range"),
        ({"seed": "x"}, "seed='x' is not used, because it is out of range"),
        ({"do_sample": "perhaps"}, "do_sample='perhaps' is not used, because it is neither true nor false"),
        ({"do_sample": []}, "do_sample=[] is not used, because it is neither true nor false"),
        ({"max_gen_toks": "many"}, "max_gen_toks='many' is not used, because it is not a number of tokens"),
        ({"max_tokens": -1}, "max_tokens=-1 is not used, because it is not a number of tokens"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty=nan is not used, because it is out of range"),
    ],
)
def test_a_setting_that_has_no_meaning_here_is_said_and_leaves_the_others(given: dict[str, Any], said: str) -> None:
    values, unused = read_generation_settings({**given, "until": ["x"]})
    assert unused == [said]
    assert values == {**GREEDY, "stop": ("x",)}
    assert read_generation_settings(None).values == GREEDY


class _Loader(yaml.SafeLoader):
    """Reads the harness's files without running what they name."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: str(node.value))


def settings_in(value: Any) -> Iterator[Any]:
    """The values of all `generation_kwargs` in a task's file."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "generation_kwargs":
                yield inner
            else:
                yield from settings_in(inner)
    if isinstance(value, list):
        for inner in value:
            yield from settings_in(inner)


@pytest.mark.slow
def test_no_installed_task_has_a_setting_that_ends_an_evaluation() -> None:
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("lm-evaluation-harness is not installed")
    count, said = 0, set()
    for path in Path(found.submodule_search_locations[0], "tasks").rglob("*"):
        if not (path.suffix in (".yaml", ".yml") or path.name.endswith("yaml")):
            continue
        text = path.read_text(encoding="utf-8")
        if "generation_kwargs" not in text:
            continue
        for given in settings_in(yaml.load(text, _Loader)):
            values, unused = read_generation_settings(given)
            SamplingParams.of(values).check()
            said |= set(unused)
            count += 1
    assert count > 300
    assert {sentence.partition(" ")[0] for sentence in said} <= {"num_beams=10"}
