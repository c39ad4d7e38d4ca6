"""The server answers like OpenAI's, keeps memories, and no client can delay the others."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import importlib.util
import inspect
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save

from tests.helpers.bundles import make
from tests.helpers.language import MEMORY_LEN, TEXT, distance_to_border, random_model
from tests.helpers.served import Served, served, wait_until
from txl_dist.cli.main import main
from txl_dist.errors import ConfigError, TxlError
from txl_dist.inference.language_model import LanguageModel
from txl_dist.serve import api_errors as refusals
from txl_dist.serve import api_schema
from txl_dist.serve import middleware as gate
from txl_dist.serve import responses as answer
from txl_dist.serve.listening import listen
from txl_dist.serve.options import Serving
from txl_dist.serve.server import Server

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0, "max_tokens": 12}
BORDER = 1e-5
"""A draw so near to a border of the distribution may differ by rounding."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(random_model(), max_prompt_len=5_000, max_tokens=400, max_choices=64, max_queue=128) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Any:
    import openai  # half a second, which the smoke test need not wait for

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.smoke
def test_a_server_streams_a_text_and_goes_on_from_its_memory(server: Served) -> None:
    lm, whole = server.service.model, server.complete(TEXT, **GREEDY).json["choices"][0]["text"]
    reply = server.complete(TEXT, **GREEDY, stream=True, keep_memory=True, stream_options={"include_usage": True})
    *pieces, usage = reply.events
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole
    assert usage["usage"] == {"prompt_tokens": len(TEXT) + 1, "completion_tokens": 12, "total_tokens": len(TEXT) + 13}
    last = pieces[-1]["choices"][0]
    assert last["finish_reason"] == "length"
    more = server.complete("", memory=last["memory"]["id"], **GREEDY).json["choices"][0]["text"]
    kept = lm.generate(TEXT, keep_memory=True, **GREEDY)
    assert (whole, more) == (kept.text, lm.generate("", memory=kept.memory, **GREEDY).text)


def test_openais_own_client_gets_texts_streams_logprobs_samples_and_stops(server: Served, client: Any) -> None:
    import openai

    assert [model.id for model in client.models.list()] == ["tiny"]
    facts = client.models.retrieve("tiny").to_dict()
    assert facts["owned_by"] == "txl_dist"
    network = server.service.model.network
    assert facts["parameters"] == sum(parameter.numel() for parameter in network.parameters())
    assert (facts["num_layers"], facts["width"]) == (network.section.num_layers, network.section.width)
    assert facts["softmax"] == ("adaptive softmax" if network.section.cutoffs else "plain softmax")
    whole = client.completions.create(model="tiny", prompt=TEXT, max_tokens=30, seed=3, logprobs=3)
    (choice,) = whole.choices
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 30
    told = choice.logprobs
    assert told is not None
    assert len(told.tokens or []) == len(told.token_logprobs or []) == 30
    assert all(len(top) in (3, 4) for top in told.top_logprobs or [])
    stream = client.completions.create(
        model="tiny",
        prompt=TEXT,
        max_tokens=30,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=0,
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == choice.text
    assert chunks[-1].usage == whole.usage
    log_probs = [p for chunk in chunks if chunk.choices for p in chunk.choices[0].logprobs.token_logprobs or []]
    assert log_probs == pytest.approx(told.token_logprobs, abs=1e-5)
    samples = client.completions.create(model="tiny", prompt=[TEXT, "a"], max_tokens=10, n=3, seed=3)
    assert [one.index for one in samples.choices] == [*range(6)]
    assert len({one.text for one in samples.choices}) == 6
    stop = choice.text[10:12]
    stopped = client.completions.create(model="tiny", prompt=TEXT, max_tokens=30, seed=3, stop=[stop, "\x00\x00\x00"])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == choice.text[: choice.text.index(stop)]
    with pytest.raises(openai.NotFoundError, match="this server has no model 'large'"):
        client.completions.create(model="large", prompt="a")
    with pytest.raises(openai.BadRequestError, match="best_of is not supported"):
        client.completions.create(model="tiny", prompt="a", best_of=3)


def test_the_text_of_a_request_is_that_of_generate_whatever_the_settings(server: Served) -> None:
    lm = server.service.model
    ids = lm.encode("the cat")
    for fields, settings in (
        ({"seed": 5}, {"seed": 5, "temperature": 1.0, "top_k": 0}),
        ({"seed": 5, "top_k": 7, "temperature": 0.7}, {"seed": 5, "top_k": 7, "temperature": 0.7}),
        ({"seed": 1, "top_p": 0.7}, {"seed": 1, "top_p": 0.7, "temperature": 1.0, "top_k": 0}),
        ({"seed": 1, "min_p": 0.1}, {"seed": 1, "min_p": 0.1, "temperature": 1.0, "top_k": 0}),
        ({"seed": 1, "allowed_token_ids": ids}, {"seed": 1, "allowed": ids, "temperature": 1.0, "top_k": 0}),
        ({"temperature": 0, "repetition_penalty": 2}, {"temperature": 0.0, "repetition_penalty": 2.0}),
    ):
        for prompt in (TEXT, "", ids):
            reply = server.complete(prompt, max_tokens=25, n=2, **fields)
            made = lm.generate_batch([prompt], max_tokens=25, num_samples=2, **settings)[0]
            assert [one["text"] for one in reply.json["choices"]] == [one.text for one in made], (fields, prompt)
    assert server.complete(TEXT, max_tokens=30).json["choices"] != server.complete(TEXT, max_tokens=30).json["choices"]
    assert server.complete(TEXT).json["usage"]["completion_tokens"] <= 16


def test_with_echo_the_prompt_is_scored_as_by_score(server: Served) -> None:
    lm, settings = server.service.model, {"echo": True, "logprobs": 2, "max_tokens": 0}
    text = "the c\u00e4t sat on the mat" * 3
    told = server.complete(text, **settings).json["choices"][0]
    assert (told["text"], told["finish_reason"]) == (text, "length")
    assert told["logprobs"]["token_logprobs"] == pytest.approx(lm.score(text).tolist(), abs=1e-5)
    assert told["logprobs"]["tokens"][5:7] == ["bytes:\\xc3", "bytes:\\xa4"]
    assert told["logprobs"]["text_offset"][:9] == [0, 1, 2, 3, 4, 5, 5, 6, 7]
    assert all(len(top) in (2, 3) for top in told["logprobs"]["top_logprobs"])
    ids = lm.encode(text)
    told = server.complete(ids, **settings).json["choices"][0]["logprobs"]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(lm.score(ids).tolist(), abs=1e-5)
    memory = server.ask("POST", "/v1/memories", {"prompt": TEXT}).json["id"]
    told = server.complete(text, **settings, memory=memory).json["choices"][0]["logprobs"]
    expected = lm.score(text, memory=lm.memory(TEXT))
    assert told["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)
    whole = server.complete(text, echo=True, logprobs=0, max_tokens=5, temperature=0).json["choices"][0]
    pieces = server.complete(text, echo=True, logprobs=0, max_tokens=5, temperature=0, stream=True).events
    joined: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
    for piece in pieces:
        for name, values in (piece["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined["tokens"] == whole["logprobs"]["tokens"]
    assert joined["text_offset"] == whole["logprobs"]["text_offset"]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["text"]
    generated = server.complete(text, logprobs=0, max_tokens=5, temperature=0).json["choices"][0]
    assert whole["text"] == text + generated["text"]
    assert whole["logprobs"]["tokens"][-5:] == generated["logprobs"]["tokens"]


def test_64_streams_at_once_are_those_of_single_runs_but_for_draws_at_a_border(server: Served) -> None:
    lm, num_draws, num_at_border = server.service.model, 0, 0
    prompts = [TEXT[: 1 + i % 39] + "abc" * (i % 7) for i in range(64)]
    fields = [{"seed": i, "max_tokens": 80, "top_k": 0} for i in range(64)]

    def stream(number: int) -> tuple[str, list[str]]:
        events = server.complete(prompts[number], **fields[number], stream=True, logprobs=0).events
        choices = [event["choices"][0] for event in events]
        tokens = [token for one in choices for token in (one["logprobs"] or {"tokens": []})["tokens"]]
        assert choices[-1]["finish_reason"] == "length" or "<|endoftext|>" in tokens
        return "".join(one["text"] for one in choices), tokens

    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(stream, range(64)))
    for prompt, settings, (text, tokens) in zip(prompts, fields, together, strict=True):
        alone = lm.generate(prompt, temperature=1.0, **settings)
        num_draws += len(alone.ids)
        if text != alone.text:
            pairs = itertools.zip_longest(tokens, alone.ids)
            first = next(i for i, (a, b) in enumerate(pairs) if b is None or a != spelt(lm, b))
            assert distance_to_border(lm, prompt, alone.ids[:first], settings["seed"]) <= BORDER
            num_at_border += 1
    assert num_draws > 3_000
    assert num_at_border <= 1


def spelt(lm: LanguageModel, i: int) -> str:
    (byte,) = lm.tokenizer.spellings[i]  # type: ignore[index]
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"


REFUSED: list[tuple[Any, int, str]] = [
    (b"", 400, "the body is not JSON"),
    (b'{"prompt": "a"', 400, "the body is not JSON"),
    (b'{"prompt": "a", "prompt": "b"}', 400, "the body has the key 'prompt' more than once"),
    (b'{"prompt": "a", "stream_options": {"x": 1, "x": 2}}', 400, "the body has the key 'x' more than once"),
    (b"[]", 400, "must be a JSON object"),
    (b"\xff\xfe", 400, "the body is not JSON"),
    (b'{"prompt": "\\ud800"}', 400, "the body is not JSON"),
    (b"[" * 100_000, 400, "the body is not JSON"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", 400, "number out of range"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
    ({"prompt": "a", "temprature": 1}, 400, "unknown field 'temprature'. Did you mean temperature?"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature: input should be greater than or equal to 0, not -1"),
    ({"prompt": "a", "temperature": True}, 400, "temperature"),
    ({"prompt": "a", "max_tokens": "5"}, 400, "max_tokens: input should be a valid integer"),
    ({"prompt": "a", "max_tokens": 401}, 400, "max_tokens: 401 is too large, because this server allows at most 400"),
    ({"prompt": "a", "n": 65}, 400, "n: 65 is too large"),
    ({"prompt": ["a"] * 33, "n": 2}, 400, "n: 66 is too large"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs: 21 is too large"),
    ({"prompt": "a", "logprobs": 20, "n": 64, "max_tokens": 400}, 400, "logprobs: the response could contain 537,600"),
    ({"prompt": 5}, 400, "prompt: give a text, a list of texts, a list of token ids"),
    ({"prompt": ["a", 5]}, 400, "prompt: give a text"),
    ({"prompt": []}, 400, "the list is empty"),
    ({"prompt": [5, 1000]}, 400, "1000 is not an id of this model's vocabulary"),
    ({"prompt": [-1]}, 400, "prompt: give a text"),
    ({"prompt": "a" * 5000}, 400, "the prompt has 5,001 tokens, but this server accepts at most 5,000"),
    ({"prompt": "a", "allowed_token_ids": [99999]}, 400, "allowed_token_ids: 99999 is not an id"),
    ({"prompt": "a", "stop": ""}, 400, "stop"),
    ({"prompt": "a", "stop": ["a"] * 17}, 400, "stop"),
    ({"prompt": "a", "stream_options": {}}, 400, "stream_options is used only with stream"),
    (
        {"prompt": "a", "stream": True, "stream_options": {"x": 1}},
        400,
        "stream_options: unknown field 'x'. Remove this field",
    ),
    ({"prompt": "a", "stop": [""]}, 400, "stop: string should have at least 1 character, not ''"),
    (
        {"prompt": "a", "suffix": "b"},
        400,
        "suffix: not supported: text cannot be inserted before other text. Remove this field.",
    ),
    ({"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty: not supported: use repetition_penalty instead."),
    ({"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias: not supported: use allowed_token_ids instead."),
    ({"prompt": "a", "model": "\x1b[2J"}, 404, r"this server has no model '\x1b[2J'. Set `model` to 'tiny'"),
    ({"prompt": "a", "memory": "mem_x"}, 404, "there is no memory 'mem_x': the memory expired"),
]


@pytest.mark.parametrize(("body", "status", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_done_is_refused_with_the_remedy(server: Served, body: Any, status: int, message: str) -> None:
    reply = server.ask("POST", "/v1/completions", body, content_type="application/json")
    assert reply.status == status, reply.body
    assert message in reply.message
    assert "\x1b" not in reply.body.decode()


def test_a_body_that_was_packed_is_not_taken_for_another(server: Served) -> None:
    body = gzip.compress(json.dumps({"prompt": "a", "max_tokens": 1}).encode())
    reply = server.ask("POST", "/v1/completions", body, content_type="application/json", content_encoding="gzip")
    assert reply.status == 415
    assert "without Content-Encoding" in reply.message


def test_without_a_seed_equal_prompts_have_texts_of_their_own_and_with_one_the_same(server: Served) -> None:
    def texts(**fields: Any) -> set[str]:
        reply = server.complete(["a"] * 4, temperature=1.0, max_tokens=40, **fields)
        return {choice["text"] for choice in reply.json["choices"]}

    assert len(texts()) == 4
    assert len(texts(seed=1)) == 1


def test_fields_that_openai_knows_and_that_change_nothing_are_taken(server: Served) -> None:
    harmless = {"user": "me", "best_of": 1, "suffix": None, "logit_bias": {}, "presence_penalty": 0, "model": None}
    plain = server.complete(TEXT, **GREEDY).json["choices"]
    assert server.complete(TEXT, **GREEDY, **harmless, frequency_penalty=0.0).json["choices"] == plain


WITH_OPENAIS_CLIENT: dict[str, list[tuple[Any, str]]] = {
    "model": [("tiny", ""), ("gpt-3.5-turbo-instruct", "this server has no model")],
    "prompt": [("a", ""), (["a", "b"], ""), ([1, 2], ""), ([[1], [2, 3]], ""), (None, ""), ([], "the list is empty")],
    "best_of": [(None, ""), (1, ""), (3, "best_of is not supported")],
    "echo": [(None, ""), (True, ""), (False, "")],
    "frequency_penalty": [(None, ""), (0, ""), (0.5, "frequency_penalty: not supported"), (-2, "not supported")],
    "logit_bias": [(None, ""), ({}, ""), ({"5": -100}, "logit_bias: not supported")],
    "logprobs": [(None, ""), (0, ""), (5, ""), (100, "logprobs: 100 is too large")],
    "max_tokens": [(None, ""), (1, ""), (10**6, "max_tokens: 1,000,000 is too large")],
    "n": [(None, ""), (2, ""), (0, "n: input should be greater than or equal to 1")],
    "presence_penalty": [(None, ""), (0, ""), (2, "presence_penalty: not supported")],
    "seed": [(None, ""), (0, ""), (2**62, ""), (-1, "seed: input should be greater than or equal to 0")],
    "stop": [(None, ""), ("a", ""), (["a", "b"], ""), ("", "stop: string should have at least 1 character")],
    "stream": [(None, ""), (False, "")],
    "stream_options": [(None, ""), ({"include_usage": True}, "stream_options is used only with stream")],
    "suffix": [(None, ""), ("", ""), ("b", "suffix: not supported")],
    "temperature": [(None, ""), (0, ""), (2, ""), (-1, "temperature: input should be greater")],
    "top_p": [(None, ""), (0.5, ""), (2, "top_p: input should be less than or equal to 1")],
    "user": [("me", "")],
    "extra_headers": [({"X-Request-Id": "1"}, "")],
    "extra_query": [({"api-version": "2024-02-01"}, "")],
    "extra_body": [
        ({"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "me"}, ""),
        ({"prompt_cache_key": "a", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "a"}}, ""),
        ({"max_completion_tokens": 5}, "unknown field 'max_completion_tokens'. Use max_tokens instead."),
        ({"n_predict": 5}, "unknown field 'n_predict'. Use max_tokens instead."),
        ({"inputs": "a"}, "unknown field 'inputs'. Use prompt instead."),
        ({"top_logprobs": 5}, "unknown field 'top_logprobs'. Use logprobs instead."),
        ({"messages": [{"role": "user", "content": "a"}]}, "'messages': this field is for chat models"),
        ({"tools": []}, "'tools': this field is for chat models"),
        ({"response_format": {"type": "text"}}, "'response_format': this field is for chat models"),
        ({"reasoning_effort": "low"}, "'reasoning_effort': this field is for chat models"),
    ],
    "timeout": [(30.0, "")],
}
"""Values of each parameter of the client's `completions.create`, and what the refusal says; empty where it works."""


@pytest.mark.parametrize(
    ("name", "value", "refusal"),
    [(name, *case) for name, cases in WITH_OPENAIS_CLIENT.items() for case in cases],
    ids=lambda value: str(value)[:40],
)
def test_each_field_of_openais_client_works_or_is_refused_once(
    client: Any, name: str, value: Any, refusal: str
) -> None:
    import openai

    fields = {"model": "tiny", "prompt": TEXT, "max_tokens": 2, name: value}
    if not refusal:
        assert client.completions.create(**fields).choices
        return
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(**fields)
    assert refused.value.status_code == (404 if name == "model" else 400)
    assert refused.value.body.keys() == {"message", "type", "param", "code"}
    assert refusal in refused.value.body["message"]


def test_no_field_of_openais_client_is_left_out(client: Any) -> None:
    parameters = inspect.signature(client.completions.create).parameters
    assert parameters.keys() == WITH_OPENAIS_CLIENT.keys()
    names = set(client.chat.completions.create.__annotations__) - parameters.keys() - {"return"}
    for name in names:  # of chat completions, which programs leave in when they are changed to this call
        known = api_schema.CompletionRequest.model_fields.keys() | refusals.FOREIGN_FIELDS.keys() | refusals.CHAT_FIELDS
        assert name in known, name


@pytest.mark.parametrize("prompt", [TEXT, [TEXT, "a"]], ids=["one prompt", "two prompts"])
def test_a_stream_ends_with_its_usage_only_where_it_is_asked_for(client: Any, prompt: Any) -> None:
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    usage = client.completions.create(**fields).usage
    *chunks, last = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage) == ([], usage)
    for chunk in chunks:
        assert len(chunk.choices) == 1
        assert chunk.to_dict()["usage"] is None
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        for chunk in client.completions.create(**fields, stream=True, stream_options=options):
            assert len(chunk.choices) == 1
            assert "usage" not in chunk.to_dict()


def test_the_size_of_an_obfuscated_chunk_does_not_tell_its_text(server: Served, client: Any) -> None:
    fields = {"max_tokens": 30, "temperature": 0, "stream": True}
    plain = client.completions.create(
        model="tiny", prompt=TEXT, **fields, stream_options={"include_obfuscation": False}
    )
    text = "".join(chunk.choices[0].text for chunk in plain)
    reply = server.complete(TEXT, **fields, stream_options={"include_obfuscation": True, "include_usage": True})
    *chunks, usage = reply.events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert usage["choices"] == []
    events = reply.body.split(b"\n\n")[: len(chunks)]
    assert {len(event + b"\n\n") % answer.PADDED_BYTES for event in events} == {0}
    assert len({chunk["obfuscation"] for chunk in chunks if chunk["obfuscation"]}) > 1


def test_unknown_paths_and_methods_are_told_in_the_same_form(server: Served) -> None:
    assert server.ask("GET", "/v1/chat/completions").status == 404
    reply = server.ask("PUT", "/v1/completions", {})
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert "the method PUT is not allowed for /v1/completions" in reply.message
    reply = server.ask("POST", "/v1/completions", b"prompt=a", content_type="application/x-www-form-urlencoded")
    assert reply.status == 415
    assert "must be application/json, not application/x-www-form-urlencoded" in reply.message


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/chat/completions", "This is a base model: it continues a text and has no chat roles or tools. Call POST"),
        ("/chat/completions", "base model"),
        ("/v1/responses", "base model"),
        ("/v1/responses/resp_1", "base model"),
        ("/v1/messages", "base model"),
        ("/v1/threads/t/runs", "base model"),
        ("/api/chat", "base model"),
        ("/v1/embeddings", "has no embeddings"),
        ("/api/embed", "has no embeddings"),
        ("/v1/rerank", "has no embeddings"),
        ("/v1/audio/speech", "generates text only"),
        ("/v1/images/generations", "generates text only"),
        ("/v1/fine_tuning/jobs", "runs no jobs"),
        ("/v1/engines/davinci/completions", "Call POST /v1/completions"),
        ("/generate", "Call POST /v1/completions"),
        ("/api/generate", "Call POST /v1/completions"),
        ("/completion", "Call POST /v1/completions"),
        ("/completions", "Call /v1/completions."),
        ("/v1/completions/", "Call /v1/completions."),
        ("/v1/v1/completions", "Call /v1/completions."),
        ("//v1//completions", "Call /v1/completions."),
        ("/v1/tokenize", "Call /tokenize."),
        ("/v1/compltions", "Did you mean /v1/completions?"),
        ("/v1", "Call GET /v1/models."),
        ("/api/tags", "Call GET /v1/models."),
        ("/models", "Call /v1/models."),
        ("/healthz", "Call GET /health."),
        ("/docs", "See /openapi.json."),
        ("/v1/chatter", "See /openapi.json."),
    ],
)
def test_a_path_of_another_server_is_told_what_to_call(server: Served, path: str, advice: str) -> None:
    for reply in (server.ask("POST", path, {"messages": []}), server.ask("GET", path)):
        assert (reply.status, reply.json["error"]["code"]) == (404, "no_route")
        assert reply.json["error"]["type"] == "not_found_error"
        assert advice in reply.message
        assert reply.message.startswith("there is nothing at /")


def test_openais_client_is_told_what_a_base_model_has(client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match=r"base model: it continues a text .* Call POST /v1/completions"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.NotFoundError, match="base model"):
        client.responses.create(model="tiny", input="a")
    with pytest.raises(openai.NotFoundError, match="has no embeddings"):
        client.embeddings.create(model="tiny", input="a")


def test_json_is_read_under_the_content_types_that_programs_do_not_choose(server: Served) -> None:
    body = json.dumps({"prompt": TEXT, **GREEDY}).encode()
    whole = server.complete(TEXT, **GREEDY).json["choices"]
    form = "application/x-www-form-urlencoded"
    for kind in (form, f"{form}; charset=utf-8", "text/plain;charset=UTF-8", "Application/JSON"):
        assert server.ask("POST", "/v1/completions", body, content_type=kind).json["choices"] == whole
    for given in (body, b"\n  " + body, codecs.BOM_UTF8 + body):
        assert server.ask("POST", "/v1/completions", given).json["choices"] == whole
    for path, asked in (("/tokenize", b'{"prompt": "a"}'), ("/v1/memories", b'{"prompt": "a"}')):
        assert server.ask("POST", path, asked, content_type=form).status in (200, 201)
    if shutil.which("curl") is not None:
        command = ["curl", "-s", "--noproxy", "*", "-d", body.decode(), f"{server.url}/v1/completions"]
        assert json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["choices"] == whole


def test_a_page_of_another_site_must_say_that_it_sends_json_which_it_cannot(server: Served) -> None:
    body = json.dumps({"prompt": TEXT, **GREEDY}).encode()
    for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
        for header in ({"origin": "https://example.org"}, {"origin": "null"}, {"sec_fetch_site": "cross-site"}):
            reply = server.ask("POST", "/v1/completions", body, content_type=kind, **header)
            assert (reply.status, "must be application/json" in reply.message) == (415, True)
    for kind in ("multipart/form-data", "application/xml", "application/octet-stream"):
        assert server.ask("POST", "/v1/completions", body, content_type=kind).status == 415
    for form in (b"prompt=a&max_tokens=5", b"%7B%22prompt%22%3A1%7D", b""):
        assert (
            server.ask("POST", "/v1/completions", form, content_type="application/x-www-form-urlencoded").status == 415
        )


def test_the_page_may_run_its_own_scripts_only(server: Served) -> None:
    reply = server.ask("GET", "/")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "unsafe" not in reply.headers["content-security-policy"]


def test_what_is_told_is_bounded_by_tokens_not_by_characters(server: Served) -> None:
    emoji = "\N{GRINNING FACE}" * 1_000  # four bytes each, and a token a byte
    asked = {"echo": True, "logprobs": 20, "n": 3, "max_tokens": 0}
    assert "logprobs: the response could contain" in server.complete(emoji, **asked).message
    assert server.complete(emoji[:100], **asked).status == 200


def test_paths_without_a_key_read_no_body_and_a_doubled_type_opens_no_wider_door(server: Served) -> None:
    with served(random_model(), max_body_bytes=2_000) as small:
        for start, status in (("GET /health", b" 200 "), ("POST /v1/memories", b" 413 ")):
            head = f"{start} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            head += "Content-Type: application/octet-stream\r\nConnection: close\r\nContent-Length: 3000\r\n\r\n"
            with socket.create_connection((small.address.hostname, small.address.port), timeout=30) as connection:
                connection.sendall(head.encode() + b'{"prompt": "')  # and no more
                assert status in connection.recv(4096)


def test_forged_files_of_memories_are_refused(server: Served) -> None:
    lm = server.service.model
    forged = save({"key_value": torch.tensor(1.0)}, {"format_version": "1", "model": lm.fingerprint, "content": "x"})
    header = json.dumps({"__metadata__": None, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    header += b" " * (-len(header) % 8)
    for data in (forged, len(header).to_bytes(8, "little") + header + bytes(4)):
        assert server.ask("POST", "/v1/memories", data, content_type="application/octet-stream").status == 400


def test_a_prompt_whose_scores_are_no_numbers_is_a_defect_of_the_model_and_told_so() -> None:
    lm = random_model()
    with torch.no_grad():
        next(iter(lm.network.parameters())).fill_(torch.nan)
    with served(lm) as broken:
        reply = broken.complete(TEXT, echo=True, logprobs=1, max_tokens=0)
        assert (reply.status, reply.json["error"]["code"]) == (500, "bad_numbers")


def test_who_waits_when_the_server_ends_is_told_that_it_ends() -> None:
    with (
        served(random_model(), max_num_seqs=1, shutdown_timeout=0.3, max_tokens=1_000_000) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(server.complete, TEXT, max_tokens=1_000_000, allowed_token_ids=[1])  # which ends no text
        wait_until(lambda: bool(server.service.worker.num_rows))
        second = pool.submit(server.complete, TEXT)
        wait_until(lambda: bool(server.service.worker.num_waiting))
        server.server.stop()
        assert first.result().json["choices"][0]["finish_reason"] == "length"
        assert (second.result().status, second.result().json["error"]["code"]) == (503, "draining")


def test_ids_and_texts_are_told_as_prompts_are_read(server: Served) -> None:
    lm = server.service.model
    reply = server.ask("POST", "/tokenize", {"prompt": TEXT})
    assert reply.json["tokens"] == list(lm.prompt(TEXT).ids)
    assert reply.json["count"] == len(TEXT) + 1
    assert server.ask("POST", "/tokenize", {"prompt": TEXT, "add_special_tokens": False}).json["tokens"] == lm.encode(
        TEXT
    )
    assert server.ask("POST", "/detokenize", {"tokens": lm.encode(TEXT)}).json == {"prompt": TEXT}
    assert server.ask("GET", "/tokenizer_info").json["eos_token_id"] == lm.tokenizer.end_of_text
    refused = server.ask("POST", "/detokenize", {"tokens": [10**6]})
    assert (refused.status, refused.json["error"]["param"]) == (400, "tokens")


def test_prometheus_is_told_what_was_done(server: Served) -> None:
    def value(name: str) -> float:
        lines = server.ask("GET", "/metrics").body.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = {name: value(name) for name in ("txl_completion_tokens_total", 'txl_requests_total{status="404"}')}
    server.complete(TEXT, max_tokens=7, temperature=0)
    server.complete(TEXT, model="other")
    assert value("txl_completion_tokens_total") == before["txl_completion_tokens_total"] + 7
    assert value('txl_requests_total{status="404"}') == before['txl_requests_total{status="404"}'] + 1
    assert value("txl_prompt_tokens_total") > 0
    assert value("txl_time_to_first_token_seconds_count") > 0
    assert value("txl_time_per_output_token_seconds_count") > 0
    assert value("process_resident_memory_bytes") > 1e7
    assert {value(name) for name in ("txl_requests_running", "txl_requests_waiting")} == {0}


def test_a_memory_is_used_by_many_changed_by_none_and_goes_on_as_the_whole_text(server: Served) -> None:
    made = server.ask("POST", "/v1/memories", {"prompt": TEXT})
    assert made.status == 201
    facts = made.json
    assert facts["tokens"] == MEMORY_LEN + 1
    assert server.ask("GET", f"/v1/memories/{facts['id']}").json["bytes"] == facts["bytes"]
    lm = server.service.model
    held = server.service.memories.get(facts["id"])
    assert held is not None
    before = torch.stack(held.memory.past.key_values).clone()
    alone = lm.generate(" and", memory=lm.memory(TEXT), **GREEDY).text
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda _: server.complete(" and", memory=facts["id"], n=3, **GREEDY).json["choices"], range(8))
        assert {one["text"] for choices in texts for one in choices} == {alone}
    assert torch.equal(torch.stack(held.memory.past.key_values), before)
    whole = server.complete("the cat sat", **GREEDY).json["choices"][0]["text"]
    first = server.ask("POST", "/v1/memories", {"prompt": "the cat"}).json["id"]
    assert server.complete(" sat", memory=first, **GREEDY).json["choices"][0]["text"] == whole
    second = server.ask("POST", "/v1/memories", {"prompt": " sa", "memory": first}).json["id"]
    assert server.complete("t", memory=second, **GREEDY).json["choices"][0]["text"] == whole
    assert server.ask("DELETE", f"/v1/memories/{first}").json == {"id": first, "object": "memory", "deleted": True}
    assert server.ask("DELETE", f"/v1/memories/{first}").status == 404
    assert server.complete(" sat", memory=first).status == 404


def test_a_memory_is_taken_away_as_a_file_and_brought_back(server: Served, tmp_path: Any) -> None:
    lm = server.service.model
    handle = server.ask("POST", "/v1/memories", {"prompt": TEXT}).json["id"]
    (tmp_path / "memory").write_bytes(server.ask("GET", f"/v1/memories/{handle}/content").body)
    loaded, made = lm.load_memory(tmp_path / "memory"), lm.memory(TEXT)
    assert loaded.last == made.last
    assert torch.equal(torch.stack(loaded.past.key_values), torch.stack(made.past.key_values))
    again = server.ask(
        "POST", "/v1/memories", (tmp_path / "memory").read_bytes(), content_type="application/octet-stream"
    )
    assert again.status == 201
    texts = [server.complete("a", memory=name, **GREEDY).json["choices"] for name in (handle, again.json["id"])]
    assert texts[0] == texts[1]


def test_a_file_that_is_no_memory_of_this_model_is_refused(server: Served) -> None:
    def refusal(data: bytes) -> str:
        reply = server.ask("POST", "/v1/memories", data, content_type="application/octet-stream")
        assert reply.status == 400
        return reply.message

    whole = server.service.model.memory(TEXT)
    data = whole.to_bytes()
    assert "cannot be read as a memory" in refusal(b"")
    assert "cannot be read as a memory" in refusal(data[:-9])
    assert "belongs to another model" in refusal(random_model(seed=4).memory(TEXT).to_bytes())
    assert "is damaged" in refusal(data[:-1] + bytes([data[-1] ^ 1]))
    shapes = torch.stack(whole.past.key_values)
    for forged in (shapes[:, :1], shapes[..., :3], shapes * torch.nan, shapes.double()):
        past = whole.past._replace(key_values=tuple(forged))
        assert "is damaged" in refusal(type(whole)(past, whole.last, whole.model).to_bytes())
    assert "is damaged" in refusal(type(whole)(whole.past, 10**6, whole.model).to_bytes())


def test_a_memory_that_is_longer_than_what_is_seen_is_refused(server: Served) -> None:
    longer = server.service.model.memory(TEXT, memory_len=MEMORY_LEN + 5).to_bytes()
    reply = server.ask("POST", "/v1/memories", longer, content_type="application/octet-stream")
    assert reply.status == 413
    assert "this memory has 30 tokens, more than this server's model sees" in reply.message


def test_numbers_of_a_forged_memory_harm_nobody_else(server: Served) -> None:
    whole = server.service.model.memory(TEXT)
    huge = whole.past._replace(key_values=tuple(torch.stack(whole.past.key_values) * 1e37))
    data = type(whole)(huge, whole.last, whole.model).to_bytes()
    handle = server.ask("POST", "/v1/memories", data, content_type="application/octet-stream").json["id"]
    alone = server.complete(TEXT, temperature=0, max_tokens=300).json["choices"][0]["text"]
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(lambda: server.complete(TEXT, temperature=0, max_tokens=300).json["choices"][0]["text"])
        bad = [server.complete("a", memory=handle, max_tokens=5) for _ in range(3)]
        assert good.result() == alone
    assert {one.status for one in bad} <= {200, 400}


def test_memories_go_by_number_bytes_and_age() -> None:
    with served(random_model(), memories=3) as server:
        names = [server.ask("POST", "/v1/memories", {"prompt": f"text {i}"}).json["id"] for i in range(3)]
        server.complete("a", memory=names[0], max_tokens=1)
        server.ask("POST", "/v1/memories", {"prompt": "one more"})
        found = [server.ask("GET", f"/v1/memories/{name}").status for name in names]
        assert found == [200, 404, 200], "the one that was not used for longest"
        assert len(set(names)) == 3
        assert all(len(name) > 30 for name in names)
        assert "no space for 4 memories at a time" in server.complete("a", n=4, keep_memory=True).message
    size = random_model().memory(TEXT).num_bytes
    with served(random_model(), memory_bytes=2 * size + 500) as server:
        names = [server.ask("POST", "/v1/memories", {"prompt": TEXT}).json["id"] for i in range(3)]
        assert [server.ask("GET", f"/v1/memories/{name}").status for name in names] == [404, 200, 200]
        assert server.service.memories.num_bytes == 2 * size
    with served(random_model(), memory_ttl=0.3) as server:
        name = server.ask("POST", "/v1/memories", {"prompt": TEXT}).json["id"]
        assert server.complete("a", memory=name).status == 200
        time.sleep(0.4)
        reply = server.complete("a", memory=name)
        assert (reply.status, reply.json["error"]["code"]) == (404, "memory_not_found")
        assert "Send the whole text again" in reply.message


def test_a_model_without_memory_is_served_too() -> None:
    lm = random_model(positions="absolute")
    with served(lm) as server:
        assert server.complete(TEXT, **GREEDY).json["choices"][0]["text"] == lm.generate(TEXT, **GREEDY).text
        told = server.complete(TEXT, echo=True, logprobs=1, max_tokens=0).json["choices"][0]["logprobs"]
        assert told["token_logprobs"] == pytest.approx(lm.score(TEXT).tolist(), abs=1e-5)
        for reply in (server.complete(TEXT, keep_memory=True), server.ask("POST", "/v1/memories", {"prompt": "a"})):
            assert reply.status == 400
            assert "has no memory" in reply.message


def test_words_are_joined_to_their_prompt_as_in_generate() -> None:
    lm = random_model(kind="word")
    with served(lm) as server:
        made = lm.generate("the cat", **GREEDY)
        told = server.complete("the cat", echo=True, logprobs=1, **GREEDY).json["choices"][0]
        assert told["text"] == "the cat" + made.text
        logprobs = told["logprobs"]
        assert len(logprobs["tokens"]) == 2 + len(made.ids) + (made.finish == "end_of_text")
        for token, offset in zip(logprobs["tokens"][2:-1], logprobs["text_offset"][2:-1], strict=True):
            assert told["text"][offset:].lstrip().startswith(token.strip())


def test_a_model_with_masks_says_that_it_scores_one_document_at_a_time() -> None:
    lm = random_model(document_mask=True)
    ids, end = lm.encode(TEXT), lm.tokenizer.end_of_text
    with served(lm) as server:
        settings = {"echo": True, "logprobs": 1, "max_tokens": 0}
        assert server.complete([end, *ids], **settings).status == 200
        reply = server.complete([end, *ids, end, *ids], **settings)
        assert reply.status == 400
        assert "the prompt contains several documents" in reply.message
        assert server.complete([end, *ids, end, *ids], max_tokens=3).status == 200


def test_only_those_with_the_key_are_served_but_health_is_open(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TXL_API_KEY", "secret")
    with served(random_model()) as server:
        for headers in ({}, {"authorization": "Bearer secre"}, {"authorization": "secret"}):
            for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/openapi.json")):
                reply = server.ask(method, path, **headers)
                assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
                assert "Authorization: Bearer KEY" in reply.message
        assert server.ask("POST", "/v1/completions", {"prompt": "a"}, authorization="Bearer secret").status == 200
        assert server.ask("GET", "/health").json == {"status": "ok", "model": "tiny"}
    (tmp_path / "key").write_text("other\n")
    assert Serving(api_key_file=tmp_path / "key").key() == "other"
    assert Serving(api_key="third").key() == "third"
    (tmp_path / "key").write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        Serving(api_key_file=tmp_path / "key").key()


def test_a_body_that_is_too_long_is_refused_however_it_is_sent(server: Served) -> None:
    with served(random_model(), max_body_bytes=1000) as small:
        assert small.complete("a" * 900).status == 200
        assert small.complete("a" * 1000).status == 413
        connection = small.connect()
        connection.request(
            "POST", "/v1/completions", iter([b"a" * 600] * 3), {"content-type": "application/json"}, encode_chunked=True
        )
        response = connection.getresponse()
        assert response.status == 413
        assert "the body has more than 1,000 bytes" in json.loads(response.read())["error"]["message"]
        upload = {"content_type": "application/octet-stream"}
        assert small.ask("POST", "/v1/memories", bytes(60_000), **upload).status == 413
        assert small.ask("POST", "/v1/memories", bytes(20_000), **upload).status == 400


LARGE = b'{"prompt": "' + b"a" * 20_000_000 + b'"}'
"""More than the buffers of a connection hold, so that a client which sends all of it first must be read."""
JSON_TYPE = {"Content-Type": "application/json"}


def by_socket(server: Served, path: str, *, is_chunked: bool) -> bytes:
    """The answer to LARGE, of a client that sends everything before it reads."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    if is_chunked:
        head += "Transfer-Encoding: chunked\r\n\r\n"
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(LARGE), LARGE)
    else:
        head += f"Content-Length: {len(LARGE)}\r\n\r\n"
        body = LARGE
    with socket.create_connection((server.address.hostname, server.address.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.2)  # a reset would arrive by now
        with connection.makefile("rb") as answer:
            return answer.read()


def by_http_client(server: Served, *, is_chunked: bool) -> int:
    connection = server.connect()
    body = iter([LARGE[:10_000_000], LARGE[10_000_000:]]) if is_chunked else LARGE
    connection.request("POST", "/v1/completions", body, JSON_TYPE, encode_chunked=is_chunked)
    status = connection.getresponse().status
    connection.close()
    return status


def by_requests(server: Served, *, is_chunked: bool) -> int:
    import requests

    body = iter([LARGE[:10_000_000], LARGE[10_000_000:]]) if is_chunked else LARGE
    with requests.Session() as session:
        session.trust_env = False
        return session.post(f"{server.url}/v1/completions", data=body, headers=JSON_TYPE, timeout=60).status_code


def by_curl(server: Served, *, is_chunked: bool) -> int:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "-s", "--noproxy", "*", "-o", "/dev/null", "-w", "%{http_code}", "--data-binary", "@-"]
    command += ["-H", "Content-Type: application/json", "-H", "Expect:"]  # without asking first
    command += ["-H", "Transfer-Encoding: chunked"] if is_chunked else []
    done = subprocess.run([*command, f"{server.url}/v1/completions"], input=LARGE, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("ask", [by_http_client, by_requests, by_curl])
def test_clients_that_send_a_long_body_first_read_the_refusal(server: Served, ask: Any, is_chunked: bool) -> None:
    for _ in range(3):
        assert ask(server, is_chunked=is_chunked) == 413
    assert server.complete("a").status == 200


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_every_early_answer_reaches_a_client_that_sends_everything_first(is_chunked: bool) -> None:
    with served(random_model(), max_body_bytes=1000, api_key="secret") as closed:
        assert b" 401 " in by_socket(closed, "/v1/completions", is_chunked=is_chunked)
        assert b" 405 " in by_socket(closed, "/health", is_chunked=is_chunked)
    with served(random_model(), max_body_bytes=1000) as server:
        answer_of_413 = by_socket(server, "/v1/completions", is_chunked=is_chunked)
        assert b" 413 " in answer_of_413
        assert b"the body has more than 1,000 bytes" in answer_of_413
        server.service.is_draining = True
        assert b" 503 " in by_socket(server, "/v1/completions", is_chunked=is_chunked)


def test_only_an_early_answer_closes_the_connection(server: Served) -> None:
    assert server.ask("POST", "/v1/completions", LARGE[:3_000_000]).headers["connection"] == "close"
    for reply in (server.ask("GET", "/"), server.complete("a", max_tokens=1), server.complete("a", n=0)):
        assert "connection" not in reply.headers


@pytest.mark.parametrize("bound", ["bytes", "seconds"])
def test_what_is_discarded_is_bounded(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(gate, "DRAIN_BYTES" if bound == "bytes" else "DRAIN_S", 2**20 if bound == "bytes" else 0.5)
    with served(random_model(), max_body_bytes=1000) as server:
        endless = socket.create_connection((server.address.hostname, server.address.port), timeout=60)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 99999999999"
        )
        endless.sendall(head.encode() + b"\r\n\r\n")
        with suppress(OSError):  # once the server has closed it
            for _ in range(10_000):
                endless.sendall(b"a" * 65536)
                time.sleep(0.001 if bound == "bytes" else 0.05)
            pytest.fail("the server read on and on")
        endless.close()
        wait_until(lambda: server.server._gate.num_active == 0)
        assert server.complete("a").status == 200


def test_who_finds_the_queue_full_is_told_to_come_again() -> None:
    with served(random_model(), max_num_seqs=1, max_queue=2, max_tokens=100_000) as server:
        streams = [begin_stream(server, max_tokens=100_000)]
        wait_until(lambda: server.service.worker.num_rows == 1)
        streams += [begin_stream(server) for _ in range(2)]
        wait_until(lambda: server.service.worker.num_waiting == 2)
        reply = server.complete("a")
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        assert "Try again later" in reply.message
        for stream in streams:
            stream.close()
        server.wait_until_idle()
        assert server.complete("a").status == 200


def begin_stream(server: Served, prompt: str = TEXT, **fields: Any) -> socket.socket:
    """A request whose answer nobody reads yet."""
    body = json.dumps({"prompt": prompt, "stream": True, "temperature": 0, **fields}).encode()  # it does not end
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = socket.create_connection((server.address.hostname, server.address.port))
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def test_the_time_of_a_request_ends_its_texts_as_they_are_and_refuses_those_that_have_not_begun() -> None:
    with served(random_model(), max_num_seqs=1, timeout=0.5, max_tokens=1_000_000) as server:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(server.complete, TEXT, max_tokens=1_000_000, temperature=0, keep_memory=True)
            wait_until(lambda: server.service.worker.num_rows == 1)
            second = pool.submit(server.complete, TEXT)
            choice = first.result().json["choices"][0]
            assert choice["finish_reason"] == "length"
            assert len(choice["text"]) > 10
            assert server.ask("GET", f"/v1/memories/{choice['memory']['id']}").status == 200
        assert second.result().status in (200, 408)
        if second.result().status == 408:
            assert "the request timed out" in second.result().message


def test_a_slow_reader_holds_nobody_up_and_50_that_are_cut_leave_their_rows(server: Served) -> None:
    before = resident_mib()
    slow = begin_stream(server, max_tokens=400, logprobs=20)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    assert server.complete(TEXT, **GREEDY).status == 200
    for number in range(50):
        connection = begin_stream(server, max_tokens=400)
        if number % 3 == 0:
            connection.recv(200)
        elif number % 3 == 1:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # reset
        connection.close()
    half = socket.create_connection((server.address.hostname, server.address.port))
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{")
    assert server.complete(TEXT, **GREEDY).status == 200
    half.close()
    slow.close()
    server.wait_until_idle()
    wait_until(lambda: server.server._gate.num_active == 0)
    assert resident_mib() < before + 50


def test_who_neither_reads_nor_sends_is_cut_off(monkeypatch: Any) -> None:
    monkeypatch.setattr(gate, "SEND_S", 0.5)
    monkeypatch.setattr(gate, "BODY_S", 0.5)
    monkeypatch.setattr(gate, "DRAIN_S", 0.5)
    with served(random_model(), max_tokens=10_000) as server:
        stuck = begin_stream(server, max_tokens=10_000, logprobs=20)
        half = socket.create_connection((server.address.hostname, server.address.port))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{")
        assert b"408 Request Timeout" in half.recv(1000)
        wait_until(lambda: server.server._gate.num_active == 0)
        server.wait_until_idle()
        stuck.close()
        half.close()


def test_a_long_prompt_does_not_stall_a_text_that_is_written(server: Served) -> None:
    """The text gets many tokens while the prompt is read."""
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(lambda: server.complete(TEXT, max_tokens=400, stream=True, temperature=0).events)
        wait_until(lambda: server.service.worker.num_rows == 1)
        began = time.monotonic()
        reading = pool.submit(server.complete, "a" * 4_900, max_tokens=1)
        writing.result()
        assert reading.result().status == 200
        assert time.monotonic() - began < 60


def test_a_server_that_drains_ends_what_it_has_and_takes_nothing_new() -> None:
    with served(random_model(), max_tokens=1_000_000, shutdown_timeout=1.0) as server, ThreadPoolExecutor(2) as pool:
        endless = pool.submit(server.complete, TEXT, max_tokens=1_000_000, temperature=0)
        wait_until(lambda: server.service.worker.num_rows == 1)
        short = pool.submit(server.complete, TEXT, max_tokens=200, temperature=0)
        wait_until(lambda: server.service.worker.num_rows == 2)
        server.server.stop()
        wait_until(lambda: server.service.is_draining)
        reply = server.complete("a")
        assert reply.status == 503
        assert "the server is stopping" in reply.message
        assert (server.ask("GET", "/health").status, server.ask("GET", "/health").json["status"]) == (503, "draining")
        assert short.result().json["usage"]["completion_tokens"] == 200
        assert endless.result().json["choices"][0]["finish_reason"] == "length"


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    taken = listen(Serving(port=0))
    with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1, port \d+: Address already in use"):
        listen(Serving(port=taken.getsockname()[1]))
    taken.close()
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid"):
        listen(Serving(host="no.such.host.invalid"))


def test_a_defect_costs_those_in_work_their_texts_and_nobody_else(server: Served, monkeypatch: Any) -> None:
    worker = server.service.worker
    with monkeypatch.context() as patch:
        patch.setattr(worker._scheduler, "step", lambda: 1 / 0)
        reply = server.complete(TEXT)
        assert reply.status == 500
        assert "The server's log contains the reason" in reply.message
    assert server.complete(TEXT).status == 200
    assert threading.active_count() < 100


def test_a_server_that_can_write_nothing_any_more_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(port=0)
    server = Server(random_model(), serving, listen(serving), name="tiny")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: asyncio.run(server.run(heeds_signals=False)))
        wait_until(lambda: server.has_started)
        worker = server.service.worker
        monkeypatch.setattr(worker._scheduler, "step", lambda: 1 / 0)
        monkeypatch.setattr(worker, "_new_scheduler", lambda: 1 / 0)
        assert Served(server).complete(TEXT).status == 500
        with pytest.raises(TxlError, match="the server cannot generate text any more"):
            running.result(timeout=30)


def test_hostile_requests_are_answered_as_its_own_page_says(tmp_path: Path) -> None:
    """By schemathesis: some hundreds, of every route; no 5xx, no undocumented status or form, no hang, no row left."""
    with served(random_model(), max_tokens=50) as server:
        before = resident_mib()
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--phases"]
        command += ["coverage,fuzzing", "--max-examples", "10", "--request-timeout", "10", "--seed", "1"]
        command += ["--exclude-checks", "positive_data_acceptance", "--continue-on-failure", "--generation-database"]
        result = subprocess.run([*command, "none"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]
        found = re.search(r"(\d+) generated, (\d+) passed", result.stdout)
        assert found is not None, result.stdout[-2000:]
        assert int(found[1]) == int(found[2]) >= 200
        server.wait_until_idle()
        assert server.complete(TEXT, **GREEDY).status == 200
        assert resident_mib() < before + 100


def resident_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20


def test_a_signal_lets_a_stream_end_and_the_program_leaves_with_0(tmp_path: Path) -> None:
    import openai

    bundle = make(tmp_path / "made").bundle
    command = [sys.executable, "-m", "txl_dist", "serve", str(bundle), "--port", "0", "--max-tokens", "1000000"]
    process = subprocess.Popen([*command, "--shutdown-timeout", "1"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = next(found[1] for line in process.stderr if (found := re.search(r"served at (\S+);", line)))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = client.completions.create(
            model="bundle", prompt="abc", max_tokens=1_000_000, stream=True, extra_body={"allowed_token_ids": [1, 2]}
        )
        pieces = iter(stream)
        next(pieces)
        process.send_signal(signal.SIGTERM)
        *_, last = pieces
    assert last.choices[0].finish_reason == "length", "its time was over, and it was told so"
    assert process.wait(timeout=30) == 0
    assert "draining" in process.stderr.read()


def test_what_is_wrong_is_told_before_the_model_is_loaded(tmp_path: Path, capfd: Any) -> None:
    bundle = make(tmp_path / "made").bundle
    taken = listen(Serving(port=0))
    port = str(taken.getsockname()[1])
    for flags, message in (
        (
            ["--port", port],
            f"port {port}: Address already in use. Stop the program that uses this port, or choose another",
        ),
        (["--max-num-seqs", "0"], "--max-num-seqs 0: it must be 1 or more texts."),
        (["--api-key", "a b"], "only printable ASCII characters without blanks"),
        (["--api-key-file", str(tmp_path / "none")], "cannot read --api-key-file"),
        (["--prot", port], "unknown flag --prot. Did you mean --port?"),
    ):
        assert main(["serve", str(bundle), *flags]) == 2
        assert message in capfd.readouterr().err
    taken.close()
    assert main(["serve", str(tmp_path / "nothing")]) == 2


def test_without_the_extra_the_line_that_installs_it_is_told(monkeypatch: Any, tmp_path: Path, capfd: Any) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert main(["serve", str(make(tmp_path / "made").bundle)]) == 2
    assert (
        'serving needs the package uvicorn. Install the extra: pip install "txl_dist[serve]"' in capfd.readouterr().err
    )
