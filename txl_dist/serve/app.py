"""Routes of the server: OpenAI's completions and models, memories, tokenizer, health, metrics and a web page.

Each route reads its own body (`_read`), so that every error has OpenAI's form and a JSON body needs no content type.
The checks that need the model or the server's limits are here and in service.py. The form of requests and responses is
in api_schema.py.
"""

from __future__ import annotations

import codecs
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from txl_dist import __version__
from txl_dist.errors import TxlError
from txl_dist.inference.language_model import Text
from txl_dist.inference.options import SamplingParams, check_ids
from txl_dist.serve import api_schema
from txl_dist.serve.api_errors import APIError, from_validation
from txl_dist.serve.api_schema import CompletionRequest, DetokenizeRequest, MemoryRequest, TokenizeRequest
from txl_dist.serve.openapi import (
    ANY_ERROR,
    COMPLETION_RESPONSE,
    FILE_RESPONSE,
    MEMORY_ERRORS,
    METRICS_RESPONSE,
    UPLOAD,
    describe_requests,
    json_response,
    request_body,
    responses,
)
from txl_dist.serve.paths import advice
from txl_dist.serve.responses import Answer, ClientGoneError, PreparedPrompt, num_tokens_of
from txl_dist.serve.service import Service

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the web page: the page may load files and request data from this server only."""
MAX_LOG_PROBS = 2**17
"""Maximum number of log-probabilities in a response. More of them would delay all other requests."""
UNNAMED_TYPES = {"", "text/plain", "application/x-www-form-urlencoded"}
"""Content types that programs such as curl send if their user chooses none."""
R = TypeVar("R", bound=BaseModel)
router = APIRouter()


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application with all routes of the server. `service` holds the model and the limits."""
    app = FastAPI(
        title="txl serve",
        version=__version__,
        description="A Transformer-XL model with OpenAI's completions API and memories.",
        docs_url=None,  # FastAPI's pages load scripts from other sites
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={
            APIError: _refuse,
            HTTPException: _refuse_route,
            ClientGoneError: _close_without_answer,
            Exception: _report_defect,
        },
    )
    app.state.service = service
    app.router.routes.extend(router.routes)  # not include_router: `_refuse_route` needs the routes themselves
    describe_requests(app)
    return app


@router.post(
    "/v1/completions",
    summary="Continue prompts",
    responses=responses(*ANY_ERROR, success=COMPLETION_RESPONSE),
    openapi_extra=request_body(CompletionRequest),
)
async def _completions(request: Request) -> Response:
    """Generate texts that continue prompts. With `stream`, send the parts of the texts as server-sent events."""
    service = _service_of(request)
    completion = await _read(request, CompletionRequest)
    service.check_name(completion.model)
    _check_limits(completion, service)
    if completion.memory:
        memory = service.memory(completion.memory).memory
    else:
        memory = None
    texts = _texts_of(completion)
    prompts = [await service.prompt(text, memory) for text in texts]
    _check_num_log_probs(completion, num_prompt_tokens=sum(len(prepared.prompt.ids) for prepared in prompts))
    scores_prompt = completion.echo and completion.logprobs is not None
    if scores_prompt:
        _check_single_documents(texts, prompts)
    service.metrics.prompt_tokens.inc(sum(num_tokens_of(prepared.prompt) for prepared in prompts))
    jobs = []
    for prepared in prompts:
        job = {"prompt": prepared.prompt, "writing": _sampling_params(completion)}
        job |= {"keeps_memory": completion.keep_memory, "scores_prompt": scores_prompt}
        jobs.append(job)
    async with AsyncExitStack() as stack:
        outputs = await stack.enter_async_context(service.at_work(jobs, request.receive))
        answer = Answer(
            completion,
            prompts,
            outputs,
            name=service.name,
            tokenizer=service.model.tokenizer,
            keep=lambda ending, prompt: service.payload(service.keep(ending, prompt)),
            metrics=service.metrics,
        )
        if not completion.stream:
            return Response(await answer.whole(), media_type="application/json")
        await outputs.ready()
        return _EventStream(answer.events(), stack.pop_all())


@router.post(
    "/v1/memories",
    summary="Remember a text",
    responses=responses(*ANY_ERROR, success=json_response(api_schema.MemoryObject), status=201),
    openapi_extra=request_body(MemoryRequest, accepts_file=True),
)
async def _make_memory(request: Request) -> Response:
    """Read a text and store its memory. Or store an uploaded memory file that `txl generate --save-memory` wrote."""
    service = _service_of(request)
    service.check_room(num_memories=1)
    if request.headers.get("content-type", "").startswith(UPLOAD):
        return await _store_uploaded_memory(request, service)
    memory_request = await _read(request, MemoryRequest)
    service.check_name(memory_request.model)
    if memory_request.memory:
        memory = service.memory(memory_request.memory).memory
    else:
        memory = None
    prepared = await service.prompt(memory_request.prompt, memory)
    service.metrics.prompt_tokens.inc(num_tokens_of(prepared.prompt))
    job = {"prompt": prepared.prompt, "writing": SamplingParams(max_tokens=0), "keeps_memory": True}
    async with service.at_work([job], request.receive) as outputs:
        ((_, chunk),) = await outputs.take()
    assert chunk.ending is not None
    stored = service.keep(chunk.ending, prepared.prompt)
    return JSONResponse(service.metadata(stored), 201)


async def _store_uploaded_memory(request: Request, service: Service) -> Response:
    """Store the memory in a request's body. Raises APIError if another model made it, or if it is too long."""
    content = await request.body()
    try:
        memory = await run_in_threadpool(service.model.read_memory, content, called="the body")
    except TxlError as error:
        raise APIError(400, str(error), code="no_memory_of_this_model") from error
    if memory.num_bytes > service.largest_memory:
        message = (
            f"this memory has {len(memory):,} tokens, more than this server's model sees. Make the memory with a "
            "shorter --memory-len."
        )
        raise APIError(413, message, code="body_too_large")
    return JSONResponse(service.metadata(service.memories.put(memory)), 201)


@router.get(
    "/v1/memories/{memory}",
    summary="Facts of a memory",
    responses=responses(*MEMORY_ERRORS, success=json_response(api_schema.MemoryObject)),
)
async def _show_memory(request: Request, memory: str) -> Response:
    """Return the facts about a stored memory."""
    service = _service_of(request)
    return JSONResponse(service.metadata(service.memory(memory)))


@router.get(
    "/v1/memories/{memory}/content",
    summary="The file of a memory",
    responses=responses(*MEMORY_ERRORS, success=FILE_RESPONSE),
)
async def _send_memory(request: Request, memory: str) -> Response:
    """Return a memory as a file.

    `txl generate --load-memory` can load the file. POST /v1/memories accepts the file on every server of the same
    model.
    """
    stored = _service_of(request).memory(memory)
    content = await run_in_threadpool(stored.memory.to_bytes)
    headers = {"Content-Disposition": "attachment; filename=memory.safetensors"}
    return Response(content, media_type=UPLOAD, headers=headers)


@router.delete(
    "/v1/memories/{memory}",
    summary="Forget a memory",
    responses=responses(*MEMORY_ERRORS, success=json_response(api_schema.Deleted)),
)
async def _forget_memory(request: Request, memory: str) -> Response:
    """Delete a stored memory. Texts that already continue from this memory are not affected."""
    service = _service_of(request)
    service.memories.remove(service.memory(memory).id)
    return JSONResponse({"id": memory, "object": "memory", "deleted": True})


@router.post(
    "/tokenize",
    summary="Ids of a text",
    responses=responses(*ANY_ERROR, success=json_response(api_schema.Tokens)),
    openapi_extra=request_body(TokenizeRequest),
)
async def _tokenize(request: Request) -> Response:
    """Return the ids of a text."""
    service = _service_of(request)
    tokenize_request = await _read(request, TokenizeRequest)
    service.check_name(tokenize_request.model)
    model = service.model

    def make_ids() -> list[int]:
        if tokenize_request.add_special_tokens:
            return list(model.prompt(tokenize_request.prompt).ids)
        return list(model.encode(tokenize_request.prompt))

    try:
        ids = await run_in_threadpool(make_ids)
    except TxlError as error:
        raise APIError(400, str(error), param="prompt", code="invalid_value") from error
    return JSONResponse({"count": len(ids), "max_model_len": _model_of(service)["max_model_len"], "tokens": ids})


@router.post(
    "/detokenize",
    summary="Text of ids",
    responses=responses(*ANY_ERROR, success=json_response(api_schema.Detokenized)),
    openapi_extra=request_body(DetokenizeRequest),
)
async def _detokenize(request: Request) -> Response:
    """Return the text that a list of ids stands for."""
    service = _service_of(request)
    detokenize_request = await _read(request, DetokenizeRequest)
    service.check_name(detokenize_request.model)
    try:
        check_ids(detokenize_request.tokens, vocab_size=service.model.tokenizer.vocab_size, what="tokens")
    except TxlError as error:
        raise APIError(400, str(error), param="tokens", code="invalid_value") from error
    text = await run_in_threadpool(service.model.decode, detokenize_request.tokens)
    return JSONResponse({"prompt": text})


@router.get(
    "/tokenizer_info",
    summary="The tokenizer",
    responses=responses(408, 413, 429, success=json_response(api_schema.TokenizerInfo)),
)
async def _tokenizer_info(request: Request) -> Response:
    """Return the facts that evaluation harnesses request about the tokenizer."""
    tokenizer = _service_of(request).model.tokenizer
    return JSONResponse({"vocab_size": tokenizer.vocab_size, "eos_token": None, "eos_token_id": tokenizer.end_of_text})


@router.get(
    "/v1/models", summary="Models", responses=responses(408, 413, 429, 503, success=json_response(api_schema.Models))
)
async def _models(request: Request) -> Response:
    """List the one model that this server runs."""
    return JSONResponse({"object": "list", "data": [_model_of(_service_of(request))]})


@router.get(
    "/v1/models/{model}",
    summary="A model",
    responses=responses(*MEMORY_ERRORS, success=json_response(api_schema.ServedModel)),
)
async def _model(request: Request, model: str) -> Response:
    """Return the facts about the model with this name."""
    service = _service_of(request)
    service.check_name(model)
    return JSONResponse(_model_of(service))


@router.get("/health", summary="Health", responses=responses(408, 413, success=json_response(api_schema.HealthStatus)))
async def _health(request: Request) -> Response:
    """Return the state of the server: 200 if it accepts requests, or 503 while it drains."""
    service = _service_of(request)
    if service.is_draining:
        return JSONResponse({"status": "draining", "model": service.name}, 503)
    return JSONResponse({"status": "ok", "model": service.name}, 200)


@router.get("/metrics", summary="Metrics", responses=responses(408, 413, 429, success=METRICS_RESPONSE))
async def _metrics(request: Request) -> Response:
    """Return the server's metrics in the text format of Prometheus."""
    return Response(_service_of(request).metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/", include_in_schema=False)
@router.get("/page.css", include_in_schema=False)
@router.get("/page.js", include_in_schema=False)
async def _show_page(request: Request) -> Response:
    """Return a file of the web page on which people can try the model."""
    headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return FileResponse(PAGE / PAGE_FILES[request.url.path], headers=headers)


def _service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _read(request: Request, form: type[R]) -> R:
    """Read a JSON body as a request of the type `form`. Raises APIError if the body does not fit this type."""
    body = (await request.body()).removeprefix(codecs.BOM_UTF8)
    _check_content_type(request, body)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise APIError(415, "a compressed body is not accepted. Send the body without Content-Encoding.")
    _check_repeated(body)
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error, fields=form.model_fields) from error


def _check_repeated(body: bytes) -> None:
    """Raise APIError if an object of the JSON body has the same key more than once, because pydantic would keep the
    last value.

    A body that is not JSON passes, because the parser of the request reports it.
    """
    try:
        json.loads(body, object_pairs_hook=_as_object)
    except (ValueError, RecursionError):
        return


def _as_object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object as a dict. Raises APIError if two members have the same key."""
    values: dict[str, Any] = {}
    for key, value in members:
        if key in values:
            raise APIError(400, f"the body has the key {key!r:.80} more than once. Send each key once.", param=key)
        values[key] = value
    return values


def _check_content_type(request: Request, body: bytes) -> None:
    """Raise APIError if the content type says that a body is not JSON.

    `curl -d` and other programs send JSON with the content type of a form, or without a content type. A web page of
    another site can send such a request too, and the browser does not first ask this server for permission. So a body
    with one of these content types is refused if a header shows that a web page sent the request.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json":
        return
    is_from_page = "origin" in request.headers or "sec-fetch-site" in request.headers
    if content_type in UNNAMED_TYPES and body.lstrip().startswith(b"{") and not is_from_page:
        return
    if content_type:
        received = f"not {content_type}"
    else:
        received = "and none is given"
    remedy = "Send JSON, and the header `Content-Type: application/json`."
    raise APIError(415, f"the content type must be application/json, {received}. {remedy}")


def _texts_of(completion: CompletionRequest) -> list[Text]:
    """Return the prompts of a request. Each prompt is a text or a list of ids."""
    prompt = completion.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[i for i in prompt if isinstance(i, int)]]
    return [text for text in prompt if not isinstance(text, int)]


def _check_limits(completion: CompletionRequest, service: Service) -> None:
    """Raise APIError if a request exceeds the limits of this server."""
    serving = service.serving
    num_prompts = len(_texts_of(completion))
    num_texts = num_prompts * completion.n
    limits = [
        ("max_tokens", completion.max_tokens, serving.max_tokens, "tokens per text"),
        ("logprobs", completion.logprobs or 0, serving.max_logprobs, "alternatives per token"),
        ("n", num_texts, serving.max_choices, "texts per request (prompts times n)"),
        ("prompt", num_prompts, serving.max_queue, "prompts per request"),
    ]
    for name, requested, limit, what in limits:
        if requested > limit:
            message = (
                f"{name}: {requested:,} is too large, because this server allows at most {limit:,} {what}. Give a "
                "smaller number."
            )
            raise APIError(400, message, param=name, code="limit_exceeded")
    if not num_texts:
        raise APIError(400, "prompt: the list is empty. Give a prompt.", param="prompt", code="invalid_value")
    if completion.keep_memory:
        service.check_room(num_memories=num_texts)
    elif completion.memory:
        service.check_room(num_memories=1)
    vocab_size = service.model.tokenizer.vocab_size
    try:
        check_ids(completion.allowed_token_ids, vocab_size=vocab_size, what="allowed_token_ids")
    except TxlError as error:
        raise APIError(400, str(error), param="allowed_token_ids", code="invalid_value") from error


def _check_num_log_probs(completion: CompletionRequest, *, num_prompt_tokens: int) -> None:
    """Raise APIError if the response would hold too many log-probabilities.

    `num_prompt_tokens` is the number of tokens of all prompts together.
    """
    if completion.logprobs is None:
        return
    if completion.echo:
        num_scored = num_prompt_tokens
    else:
        num_scored = 0
    num_generated = len(_texts_of(completion)) * completion.max_tokens
    num_log_probs = completion.n * (num_scored + num_generated) * (1 + completion.logprobs)
    if num_log_probs > MAX_LOG_PROBS:
        message = (
            f"logprobs: the response could contain {num_log_probs:,} log-probabilities, but the limit per request is "
            f"{MAX_LOG_PROBS:,}. Lower logprobs, max_tokens or n."
        )
        raise APIError(400, message, param="logprobs", code="limit_exceeded")


def _check_single_documents(texts: list[Text], prompts: list[PreparedPrompt]) -> None:
    """Raise APIError if a prompt of ids holds several documents, because only the last document could be scored."""
    for text, prepared in zip(texts, prompts, strict=True):
        num_seen = len(prepared.prompt.ids) - prepared.prompt.num_led
        if not isinstance(text, str) and num_seen < len(text):
            raise APIError(
                400,
                "the prompt contains several documents, of which the model sees only the last. To get logprobs, send "
                "each document as a separate prompt.",
                param="prompt",
                code="invalid_value",
            )


def _sampling_params(completion: CompletionRequest) -> SamplingParams:
    """Return the sampling settings for one prompt of a request. Their seed is the request's seed.

    If the request has no seed, each call draws a new seed. The function is called once per prompt.
    """
    stop = (completion.stop,) if isinstance(completion.stop, str) else tuple(completion.stop)
    if completion.seed is None:
        seed = secrets.randbits(63)
    else:
        seed = completion.seed
    if completion.logprobs is None:
        num_log_probs = -1
    else:
        num_log_probs = completion.logprobs
    return SamplingParams(
        max_tokens=completion.max_tokens,
        temperature=completion.temperature,
        top_k=max(0, completion.top_k),
        top_p=completion.top_p,
        min_p=completion.min_p,
        repetition_penalty=completion.repetition_penalty,
        allowed=tuple(completion.allowed_token_ids),
        stop=stop,
        seed=seed,
        num_samples=completion.n,
        log_probs=num_log_probs,
    )


def _model_of(service: Service) -> dict[str, Any]:
    """Return the facts about the model: OpenAI's fields, `max_model_len` of vLLM, and further fields."""
    serving = service.serving
    model = service.model
    section = service.model.network.section
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "txl_dist",
        "max_model_len": serving.max_prompt_len + serving.max_tokens,
        "memory_len": service.memory_len,
        "vocab_size": model.tokenizer.vocab_size,
        "parameters": sum(parameter.numel() for parameter in model.network.parameters()),
        "num_layers": section.num_layers,
        "width": section.width,
        "num_heads": section.num_heads,
        "positions": section.positions,
        "softmax": "adaptive softmax" if section.cutoffs else "plain softmax",
        "tokenizer": model.tokenizer.kind,
    }


class _EventStream(Response):
    """Response of server-sent events. `work` is the context in which the worker generates the texts. The context is
    closed after the last event, or when the client has disconnected."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], work: AsyncExitStack) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._work:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for events in self._events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            except ClientGoneError:
                pass
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _refuse(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, APIError)
    return refusal.response()


async def _refuse_route(request: Request, error: Exception) -> Response:
    """Return the error for a path or method without a route, with advice. Status 405 also lists the allowed methods."""
    assert isinstance(error, HTTPException)
    paths = {route.path for route in request.app.routes if "{" not in route.path}
    remedies = {
        404: f"there is nothing at {request.url.path}. {advice(request.url.path, known=paths)}",
        405: f"the method {request.method} is not allowed for {request.url.path}. See /openapi.json.",
    }
    message = remedies.get(error.status_code, str(error.detail))
    response = APIError(error.status_code, message, code="no_route").response()
    if error.status_code == 405:
        methods: set[str] = set()
        for route in request.app.routes:
            if route.matches(request.scope)[0] is not Match.NONE:
                methods |= route.methods
        response.headers["Allow"] = ", ".join(sorted(methods))
    return response


async def _close_without_answer(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _report_defect(request: Request, error: Exception) -> Response:
    return APIError(500, "the server failed. The server's log contains the reason.", code="defect").response()
