"""The routes: OpenAI's completions and models, memories, health and metrics."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
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
from txl_dist.serve import schema
from txl_dist.serve.api_errors import APIError, of_validation
from txl_dist.serve.paths import advice
from txl_dist.serve.responses import Answer, ClientGoneError, num_tokens_of
from txl_dist.serve.schema import CompletionRequest, DetokenizeRequest, MemoryRequest, TokenizeRequest
from txl_dist.serve.service import Service

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""What the page may load and ask: this server alone."""
MOST_TOLD = 2**17
"""Log-probabilities of a request: to write more of them would hold up all others."""
UPLOAD = "application/octet-stream"
UNNAMED_TYPES = {"", "text/plain", "application/x-www-form-urlencoded"}
"""Content types of a client that did not choose one."""
R = TypeVar("R", bound=BaseModel)


def create_app(service: Service) -> FastAPI:
    """The routes of a service."""
    app = FastAPI(
        title="txl serve",
        version=__version__,
        description="A Transformer-XL behind OpenAI's completions, with memories.",
        docs_url=None,  # their pages load scripts of others
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={
            APIError: _refuse,
            HTTPException: _refuse_route,
            ClientGoneError: _nobody_reads,
            Exception: _say_failed,
        },
    )
    app.state.service = service
    for path, method, route, described in _ROUTES:
        app.add_api_route(path, route, methods=[method], response_model=None, **described)
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        described = make_schema()
        for model in (CompletionRequest, MemoryRequest, TokenizeRequest, DetokenizeRequest):
            own = model.model_json_schema(ref_template="#/components/schemas/{model}")
            described["components"]["schemas"] |= {**own.pop("$defs", {}), model.__name__: own}
        for operations in described["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return described

    app.openapi = openapi  # type: ignore[method-assign]
    return app


async def _completions(request: Request) -> Response:
    """Texts that go on from prompts; with `stream` in pieces, as server-sent events, as they are made."""
    service = _service_of(request)
    order = await _read(request, CompletionRequest)
    service.check_name(order.model)
    _check_limits(order, service)
    memory = service.memory(order.memory).memory if order.memory else None
    begun = [await service.prompt(text, memory) for text in _texts_of(order)]
    _check_told(order, num_prompt=sum(len(one.prompt.ids) for one in begun))
    scores_prompt = order.echo and order.logprobs is not None
    if scores_prompt:
        for text, one in zip(_texts_of(order), begun, strict=True):
            if not isinstance(text, str) and len(one.prompt.ids) - one.prompt.num_led < len(text):
                raise APIError(
                    400,
                    "the prompt holds several documents, of which the model sees the last. Give each "
                    "as a prompt of its own to have its logprobs.",
                    param="prompt",
                    code="invalid_value",
                )
    service.metrics.prompt_tokens.inc(sum(num_tokens_of(one.prompt) for one in begun))
    shared = {"keeps_memory": order.keep_memory, "scores_prompt": scores_prompt}
    async with AsyncExitStack() as stack:
        jobs = [{"prompt": one.prompt, "writing": _writing_of(order), **shared} for one in begun]
        work = service.at_work(jobs, request.receive)
        inbox = await stack.enter_async_context(work)
        answer = Answer(
            order,
            begun,
            inbox,
            name=service.name,
            tokenizer=service.model.tokenizer,
            keep=lambda ending, prompt: service.told(service.keep(ending, prompt)),
            metrics=service.metrics,
        )
        if not order.stream:
            return Response(await answer.whole(), media_type="application/json")
        await inbox.ready()
        return _EventStream(answer.events(), stack.pop_all())


async def _make_memory(request: Request) -> Response:
    """What the model remembers of a text, read once; or of the file that `txl generate --save-memory` wrote."""
    service = _service_of(request)
    service.check_room(num_memories=1)
    if request.headers.get("content-type", "").startswith(UPLOAD):
        data = await request.body()
        try:
            given = await run_in_threadpool(service.model.read_memory, data, called="the body")
        except TxlError as error:
            raise APIError(400, str(error), code="no_memory_of_this_model") from error
        if given.num_bytes > service.largest_memory:
            message = (
                f"this memory has {len(given):,} tokens, more than are seen here. Make it with a shorter --memory-len."
            )
            raise APIError(413, message, code="body_too_large")
        return JSONResponse(service.facts(service.memories.put(given)), 201)
    order = await _read(request, MemoryRequest)
    service.check_name(order.model)
    memory = service.memory(order.memory).memory if order.memory else None
    begun = await service.prompt(order.prompt, memory)
    service.metrics.prompt_tokens.inc(num_tokens_of(begun.prompt))
    job = {"prompt": begun.prompt, "writing": SamplingParams(max_tokens=0), "keeps_memory": True}
    async with service.at_work([job], request.receive) as inbox:
        ((_, piece),) = await inbox.take()
    assert piece.ending is not None
    return JSONResponse(service.facts(service.keep(piece.ending, begun.prompt)), 201)


async def _show_memory(request: Request, memory: str) -> Response:
    """Facts of a memory."""
    service = _service_of(request)
    return JSONResponse(service.facts(service.memory(memory)))


async def _send_memory(request: Request, memory: str) -> Response:
    """Its file, which `txl generate --load-memory` reads, and POST /v1/memories of any server of the same model."""
    held = _service_of(request).memory(memory)
    content = await run_in_threadpool(held.memory.to_bytes)
    return Response(
        content, media_type=UPLOAD, headers={"Content-Disposition": "attachment; filename=memory.safetensors"}
    )


async def _forget_memory(request: Request, memory: str) -> Response:
    """Forget it now. Texts in work that began from it go on."""
    service = _service_of(request)
    service.memories.remove(service.memory(memory).id)
    return JSONResponse({"id": memory, "object": "memory", "deleted": True})


async def _tokenize(request: Request) -> Response:
    """The ids of a text."""
    service = _service_of(request)
    order = await _read(request, TokenizeRequest)
    service.check_name(order.model)
    model = service.model
    make = (lambda: model.prompt(order.prompt).ids) if order.add_special_tokens else lambda: model.encode(order.prompt)
    try:
        ids = list(await run_in_threadpool(make))
    except TxlError as error:
        raise APIError(400, str(error), param="prompt", code="invalid_value") from error
    return JSONResponse({"count": len(ids), "max_model_len": _model_of(service)["max_model_len"], "tokens": ids})


async def _detokenize(request: Request) -> Response:
    """The text of ids."""
    service = _service_of(request)
    order = await _read(request, DetokenizeRequest)
    service.check_name(order.model)
    try:
        check_ids(order.tokens, vocab_size=service.model.tokenizer.vocab_size, what="tokens")
    except TxlError as error:
        raise APIError(400, str(error), param="tokens", code="invalid_value") from error
    return JSONResponse({"prompt": await run_in_threadpool(service.model.decode, order.tokens)})


async def _tokenizer_info(request: Request) -> Response:
    """What harnesses ask of a tokenizer."""
    tokenizer = _service_of(request).model.tokenizer
    return JSONResponse({"vocab_size": tokenizer.vocab_size, "eos_token": None, "eos_token_id": tokenizer.end_of_text})


async def _models(request: Request) -> Response:
    """The model that is served."""
    return JSONResponse({"object": "list", "data": [_model_of(_service_of(request))]})


async def _model(request: Request, model: str) -> Response:
    """The same, by its name."""
    service = _service_of(request)
    service.check_name(model)
    return JSONResponse(_model_of(service))


async def _health(request: Request) -> Response:
    """Whether requests are taken; 503 while the server drains."""
    service = _service_of(request)
    status = "draining" if service.is_draining else "ok"
    return JSONResponse({"status": status, "model": service.name}, 503 if service.is_draining else 200)


async def _metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(_service_of(request).metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _show_page(request: Request) -> Response:
    """A page to try the model on, and its parts."""
    headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return FileResponse(PAGE / PAGE_FILES[request.url.path], headers=headers)


def _service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _read(request: Request, form: type[R]) -> R:
    """A body. Raises RefusalError for one that cannot be read."""
    body = (await request.body()).removeprefix(codecs.BOM_UTF8)
    _check_type(request, body)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise APIError(415, "bodies are taken as they are. Send it without Content-Encoding.")
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        raise of_validation(error, known=form.model_fields) from error


def _check_type(request: Request, body: bytes) -> None:
    """Raises RefusalError for a body that is not JSON by its content type.

    `curl -d` and other programs send JSON under the type of a form, or without a type. A web page of another site can
    send such a request too, without asking first, so it counts only where no browser names its page.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return
    is_from_page = "origin" in request.headers or "sec-fetch-site" in request.headers
    if kind in UNNAMED_TYPES and body.lstrip().startswith(b"{") and not is_from_page:
        return
    given = f"not {kind}" if kind else "and none is given"
    remedy = "Send JSON, and the header `Content-Type: application/json`."
    raise APIError(415, f"the content type must be application/json, {given}. {remedy}")


def _texts_of(order: CompletionRequest) -> list[Text]:
    """The prompts of a request."""
    prompt = order.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[i for i in prompt if isinstance(i, int)]]
    return [one for one in prompt if not isinstance(one, int)]


def _check_limits(order: CompletionRequest, service: Service) -> None:
    """Raises RefusalError for more than this server gives."""
    serving, texts = service.serving, _texts_of(order)
    num_texts = len(texts) * order.n
    limits = [
        ("max_tokens", order.max_tokens, serving.max_tokens, "tokens of a text"),
        ("logprobs", order.logprobs or 0, serving.max_logprobs, "alternatives of a token"),
        ("n", num_texts, serving.max_texts, "texts of a request, its prompts times n"),
        ("prompt", len(texts), serving.queue, "prompts of a request"),
    ]
    for name, asked, most, what in limits:
        if asked > most:
            message = f"{name}: {asked:,} are asked for; this server makes at most {most:,} {what}. Ask for fewer."
            raise APIError(400, message, param=name, code="limit_exceeded")
    if not num_texts:
        raise APIError(400, "prompt: the list is empty. Give a prompt.", param="prompt", code="invalid_value")
    if order.keep_memory or order.memory:
        service.check_room(num_memories=num_texts if order.keep_memory else 1)
    try:
        check_ids(order.allowed_token_ids, vocab_size=service.model.tokenizer.vocab_size, what="allowed_token_ids")
    except TxlError as error:
        raise APIError(400, str(error), param="allowed_token_ids", code="invalid_value") from error


def _check_told(order: CompletionRequest, *, num_prompt: int) -> None:
    """Raises RefusalError for more log-probabilities than may be told, of prompts with so many tokens in all."""
    if order.logprobs is None:
        return
    num_read = num_prompt if order.echo else 0
    num_told = order.n * (num_read + len(_texts_of(order)) * order.max_tokens) * (1 + order.logprobs)
    if num_told > MOST_TOLD:
        message = f"logprobs: up to {num_told:,} would be told; a request may have {MOST_TOLD:,}. Ask for fewer."
        raise APIError(400, message, param="logprobs", code="limit_exceeded")


def _writing_of(order: CompletionRequest) -> SamplingParams:
    """Of one prompt: without a seed each has its own, so that equal ones differ."""
    return SamplingParams(
        max_tokens=order.max_tokens,
        temperature=order.temperature,
        top_k=max(0, order.top_k),
        top_p=order.top_p,
        min_p=order.min_p,
        repetition_penalty=order.repetition_penalty,
        allowed=tuple(order.allowed_token_ids),
        stop=(order.stop,) if isinstance(order.stop, str) else tuple(order.stop),
        seed=secrets.randbits(63) if order.seed is None else order.seed,
        num_samples=order.n,
        log_probs=-1 if order.logprobs is None else order.logprobs,
    )


def _model_of(service: Service) -> dict[str, Any]:
    serving, model, section = service.serving, service.model, service.model.network.section
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "txl_dist",
        "max_model_len": serving.max_prompt + serving.max_tokens,
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
    """Server-sent events; `work` ends with them, or with the client."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], work: AsyncExitStack) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._work = events, work

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
    assert isinstance(error, HTTPException)
    paths = {route.path for route in request.app.routes if "{" not in route.path}
    remedies = {
        404: f"there is nothing at {request.url.path}. {advice(request.url.path, known=paths)}",
        405: f"{request.method} is not for {request.url.path}. See /openapi.json.",
    }
    refusal = APIError(error.status_code, remedies.get(error.status_code, str(error.detail)), code="no_route")
    response = refusal.response()
    if error.status_code == 405:
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        response.headers["Allow"] = ", ".join(sorted({method for route in routes for method in route.methods}))
    return response


async def _nobody_reads(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _say_failed(request: Request, error: Exception) -> Response:
    return APIError(500, "the server failed; its log says why.", code="defect").response()


def _described(
    summary: str, *statuses: int, answer: type[BaseModel] | None = None, status: int = 200, **more: Any
) -> dict[str, Any]:
    """Of a route for its OpenAPI page: what it answers, and what it refuses with."""
    meanings = {
        400: "What is asked cannot be done; `param` says which field.",
        401: "The key is missing or wrong.",
        404: "There is no such model or memory (any more).",
        408: "The body came too slowly, or the time of the request was over before a text of it had begun.",
        413: "The body is too long.",
        415: "The content type is none that is read here.",
        429: "Too many wait already; come again after Retry-After seconds.",
        500: "A defect, or a model whose probabilities are no numbers.",
        503: "The server is stopping, or has no room for a memory.",
    }
    responses: dict[int | str, dict[str, Any]] = {
        code: {"model": schema.Error, "description": meanings[code]} for code in (401, *statuses)
    }
    if answer is not None:
        responses[status] = {"model": answer, "description": answer.__doc__}
    return {"summary": summary, "responses": {**responses, **more.pop("responses", {})}, **more}


def _body(name: str, *, upload: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    if upload:
        content[UPLOAD] = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"required": True, "content": content}}


_ALL = (400, 404, 408, 413, 415, 429, 500, 503)
_OF_MEMORY = (404, 408, 413, 429, 503)
_TEXT = {"schema": {"type": "string"}}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_ROUTES: list[tuple[str, str, Any, dict[str, Any]]] = [
    (
        "/v1/completions",
        "POST",
        _completions,
        _described(
            "Continue prompts",
            *_ALL,
            openapi_extra=_body("CompletionRequest"),
            responses={
                200: {
                    "model": schema.Completion,
                    "description": "The texts; with `stream` their pieces, each a Completion in a server-sent event.",
                    "content": {"text/event-stream": {"schema": _EVENT}},
                }
            },
        ),
    ),
    (
        "/v1/memories",
        "POST",
        _make_memory,
        _described(
            "Remember a text",
            *_ALL,
            answer=schema.MemoryObject,
            status=201,
            openapi_extra=_body("MemoryRequest", upload=True),
        ),
    ),
    (
        "/v1/memories/{memory}",
        "GET",
        _show_memory,
        _described("Facts of a memory", *_OF_MEMORY, answer=schema.MemoryObject),
    ),
    (
        "/v1/memories/{memory}/content",
        "GET",
        _send_memory,
        _described(
            "The file of a memory",
            *_OF_MEMORY,
            responses={200: {"content": {UPLOAD: {"schema": {"type": "string", "format": "binary"}}}}},
        ),
    ),
    (
        "/v1/memories/{memory}",
        "DELETE",
        _forget_memory,
        _described("Forget a memory", *_OF_MEMORY, answer=schema.Deleted),
    ),
    (
        "/tokenize",
        "POST",
        _tokenize,
        _described("Ids of a text", *_ALL, answer=schema.Tokens, openapi_extra=_body("TokenizeRequest")),
    ),
    (
        "/detokenize",
        "POST",
        _detokenize,
        _described("Text of ids", *_ALL, answer=schema.Detokenized, openapi_extra=_body("DetokenizeRequest")),
    ),
    (
        "/tokenizer_info",
        "GET",
        _tokenizer_info,
        _described("The tokenizer", 408, 413, 429, answer=schema.TokenizerInfo),
    ),
    ("/v1/models", "GET", _models, _described("Models", 408, 413, 429, 503, answer=schema.Models)),
    ("/v1/models/{model}", "GET", _model, _described("A model", *_OF_MEMORY, answer=schema.Model)),
    ("/health", "GET", _health, _described("Health", 408, 413, answer=schema.HealthStatus)),
    (
        "/metrics",
        "GET",
        _metrics,
        _described("Metrics", 408, 413, 429, responses={200: {"content": {"text/plain": _TEXT}}}),
    ),
    *((path, "GET", _show_page, {"include_in_schema": False}) for path in PAGE_FILES),
]
