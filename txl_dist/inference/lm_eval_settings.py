"""Translation of the `generation_kwargs` in tasks of lm-evaluation-harness to settings of txl_dist.

Tasks are written for other backends, and spell settings in several ways. A setting that txl_dist has is translated. A
setting that would change nothing is left out. Any other setting gives a warning and is not used, so that it cannot end
an evaluation that takes hours.

    max_gen_toks, max_new_tokens, max_tokens, max_completion_tokens     the first of them counts, as in the harness
    until, stop, stop_sequences                                         strings, lists of them, or null
    do_sample, temperature                                              a temperature above 0 samples without do_sample
    top_k, top_p, min_p, repetition_penalty, seed                       the same in txl_dist
    num_beams: 1, use_cache, pad_token_id ...                           change nothing

Beam search is not supported, so num_beams above 1 is greedy here. A limit on prompt and text together (max_length) is
not supported either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
MOST_NEW_TOKENS = 256
"""Number of tokens to generate if a task does not set a number. The harness has the same default."""
STOPS = ("until", "stop", "stop_sequences")
CHANGES_NOTHING: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "n": (1,),
    "num_return_sequences": (1,),
    "best_of": (1,),
    "early_stopping": (True, False),  # of beams
    "length_penalty": (1, 1.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "no_repeat_ngram_size": (0,),
    "min_new_tokens": (0,),
    "min_length": (0,),
    "typical_p": (1, 1.0),
}
"""Values of settings that do not change the text in txl_dist. A setting with one of its listed values is ignored
without a warning."""
SWITCHES = {
    **dict.fromkeys(("true", "yes", "on", "1", "1.0"), True),
    **dict.fromkeys(("false", "no", "off", "0", "0.0"), False),
}
"""Spellings of true and false as text, because a task or a command line may quote the value."""
OF_OTHER_BACKENDS = frozenset(
    {"use_cache", "pad_token_id", "eos_token_id", "bos_token_id", "return_dict_in_generate", "output_scores"}
    | {"skip_special_tokens", "spaces_between_special_tokens", "synced_gpus", "stream", "add_special_tokens"}
)
"""Settings of other backends that do not change the generated text, so they are ignored."""


class GenerationSettings(NamedTuple):
    """Translated settings for `SamplingParams`, with a sentence for each setting that is not used."""

    values: dict[str, Any]
    """Settings by the names of `SamplingParams`."""
    unused: list[str]
    """Sentences for the log, one for each setting that is not used."""


def read_generation_settings(given: Mapping[str, Any] | None) -> GenerationSettings:
    """Translate the `generation_kwargs` of one request. Unknown settings do not raise an error."""
    settings = {name: value for name, value in (given or {}).items() if value is not None}
    unused: list[str] = []
    values: dict[str, Any] = {"max_tokens": _length(settings, unused), "stop": _stops(settings)}
    values |= _sampling(settings, unused)
    for name, value in settings.items():
        if name in OF_OTHER_BACKENDS or value in CHANGES_NOTHING.get(name, ()):
            continue
        if name == "num_beams":
            instead = ", because beam search is not supported"
        else:
            instead = ""
        unused.append(f"{name}={value!r:.80} is not used{instead}")
    return GenerationSettings(values, unused)


def _length(settings: dict[str, Any], unused: list[str]) -> int:
    """Remove all settings of the number of new tokens, and return the value of the first of these settings."""
    found: dict[str, int] = {}
    for name in LENGTHS:
        if name in settings:
            value = settings.pop(name)
            number = _number(value)
            if number is not None and number >= 0:
                found[name] = int(number)
            else:
                unused.append(f"{name}={value!r:.80} is not used, because it is not a number of tokens")
    if not found:
        return MOST_NEW_TOKENS
    first, *others = found
    for name in others:
        if found[name] != found[first]:
            unused.append(f"{name}={found[name]} is not used, because {first}={found[first]} takes precedence")
    return found[first]


def _stops(settings: dict[str, Any]) -> tuple[str, ...]:
    """Remove the stop strings from the settings, and return them."""
    found: list[str] = []
    for name in STOPS:
        value = settings.pop(name, ())
        if isinstance(value, list | tuple | set | frozenset):
            several = value
        else:
            several = [value]
        found += [str(stop) for stop in several if stop is not None and str(stop)]
    return tuple(dict.fromkeys(found))


def _sampling(settings: dict[str, Any], unused: list[str]) -> dict[str, Any]:
    """Remove the sampling settings, and return them as fields of `SamplingParams`. Without sampling settings the text
    is greedy."""
    temperature = _taken(settings, "temperature", float, lambda value: value >= 0, unused)
    samples = _switch(settings, "do_sample", unused)
    if samples is None:
        samples = temperature is not None and temperature > 0
    if samples and temperature is None:
        temperature = 1.0
    found: dict[str, Any] = {"temperature": temperature if samples else 0.0}
    rules: dict[str, tuple[type[float] | type[int], Callable[[float], bool]]] = {
        "top_k": (int, lambda value: value >= 0),
        "top_p": (float, lambda value: 0 < value <= 1),
        "min_p": (float, lambda value: 0 <= value <= 1),
        "repetition_penalty": (float, lambda value: value >= 1),
        "seed": (int, lambda value: 0 <= value < 2**63),
    }
    if settings.get("top_k") == -1:  # vLLM: all
        settings["top_k"] = 0
    for name, (kind, holds) in rules.items():
        value = _taken(settings, name, kind, holds, unused)
        if value is not None:
            found[name] = value
    return {"top_k": 0, **found}


def _switch(settings: dict[str, Any], name: str, unused: list[str]) -> bool | None:
    """Remove a setting that is true or false, and return its value. A value that is written as text or as a number
    counts too. Returns None if the setting is missing or invalid."""
    value = settings.pop(name, None)
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none", "null")):
        return None
    found = SWITCHES.get(str(value).strip().lower())
    if found is None:
        unused.append(f"{name}={value!r:.80} is not used, because it is neither true nor false")
    return found


def _taken(
    settings: dict[str, Any],
    name: str,
    kind: type[float] | type[int],
    holds: Callable[[float], bool],
    unused: list[str],
) -> Any:
    """Remove the setting `name` and return its value as a number. Returns None if the setting is missing or cannot be
    used."""
    if name not in settings:
        return None
    value = settings.pop(name)
    number = _number(value)
    if number is None or not holds(number):
        unused.append(f"{name}={value!r:.80} is not used, because it is out of range")
        return None
    return kind(number)


def _number(value: Any) -> float | None:
    """Return a value as a finite number. A number that is written as text counts too. Returns None for any other
    value."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if math.isfinite(number):
        return number
    return None
