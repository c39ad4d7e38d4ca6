"""Requests and responses as data classes: OpenAI's completions, and memories.

Fields that OpenAI does not have are named as in vLLM. Requests are read strictly: a string is not accepted as a number,
and an unknown field is refused. A field that is null counts as absent. The descriptions here are part of /openapi.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Stop = Annotated[str, Field(min_length=1, max_length=64)]
Id = Annotated[int, Field(ge=0, lt=2**32)]
PromptField = str | list[str] | list[Id] | list[list[Id]]
_PROMPT = "A text, a list of texts, a list of token ids, or a list of lists of token ids. Ids are used unchanged."
_FORMS = "give a text, a list of texts, a list of token ids, or a list of lists of token ids"


def _allow_null(schema: dict[str, Any]) -> None:
    """Change a request's JSON schema so that each optional field can be null."""
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        if name in required:
            continue
        about = {key: field.pop(key) for key in ("description", "title", "default") if key in field}
        schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **about}


class _Request(BaseModel):
    """Base of all requests. Types are strict, unknown fields are refused, and null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_allow_null)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None}

    @field_validator("prompt", mode="wrap", check_fields=False)
    @classmethod
    def _one_message(cls, value: Any, check: Any, info: ValidationInfo) -> Any:
        """Replace the messages of pydantic, one for each form that the field `prompt` can have, by a single message."""
        try:
            return check(value)
        except ValueError:
            raise ValueError(_FORMS) from None


class StreamOptions(_Request):
    """Options for the events of a stream."""

    include_usage: bool = Field(False, description="Send one more chunk at the end, with the numbers of tokens used.")
    include_obfuscation: bool = Field(
        False, description="Add random characters to each chunk, so that its size does not reveal the text."
    )


class CompletionRequest(_Request):
    """One or several prompts to continue, with the limits and sampling settings."""

    model: str = Field("", description="Name of the model, as /v1/models lists it. Optional.")
    prompt: PromptField = Field("", description=_PROMPT + " If it is absent or empty, the text begins a new document.")
    max_tokens: int = Field(
        16, ge=0, lt=2**31, description="Maximum number of tokens to generate. 0 generates no token."
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature. 0 takes the likeliest token.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the fewest likeliest tokens whose probabilities sum to at least this value.",
    )
    n: int = Field(1, ge=1, lt=2**31, description="Number of texts per prompt.")
    stream: bool = Field(False, description="Send pieces of the texts while they are generated, as server-sent events.")
    stream_options: StreamOptions | None = Field(
        None, description="Options of a stream. They are allowed only with stream."
    )
    logprobs: int | None = Field(
        None, ge=0, lt=2**31, description="Return the log-probability of each token, and of this many likeliest tokens."
    )
    echo: bool = Field(False, description="Begin the text with the prompt. logprobs then include the prompt's tokens.")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] = Field(
        [], description="End the text before the first of these strings."
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="Seed of the random choice of tokens.")
    user: str = Field("", description="Accepted without effect.")
    metadata: dict[str, Any] = Field({}, description="Accepted without effect.")
    store: bool = Field(False, description="Accepted without effect: no completion is stored.")
    safety_identifier: str = Field("", description="Accepted without effect.")
    service_tier: str = Field("", description="Accepted without effect: the server has one tier.")
    prompt_cache_key: str = Field("", description="Accepted without effect: use `memory`.")
    prompt_cache_options: dict[str, Any] = Field({}, description="Accepted without effect.")
    prompt_cache_retention: str = Field("", description="Accepted without effect.")
    suffix: str = Field("", max_length=0, description="Not supported: text cannot be inserted before other text.")
    best_of: int | None = Field(None, ge=1, lt=2**31, description="Not supported. Only the value of n is accepted.")
    presence_penalty: float = Field(0.0, ge=0, le=0, description="Not supported: use repetition_penalty instead.")
    frequency_penalty: float = Field(0.0, ge=0, le=0, description="Not supported: use repetition_penalty instead.")
    logit_bias: dict[str, float] = Field({}, max_length=0, description="Not supported: use allowed_token_ids instead.")
    top_k: int = Field(
        0, ge=-1, lt=2**31, description="Sample from this many likeliest tokens. 0 or -1 means all tokens."
    )
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Sample only from tokens with at least this share of the likeliest token's probability.",
    )
    repetition_penalty: float = Field(
        1.0, ge=1, le=1000, description="Factor of the log-probability of tokens that have occurred. 1 changes nothing."
    )
    allowed_token_ids: list[Id] = Field(
        [], max_length=4096, description="Generate only tokens with these ids. An empty list allows all tokens."
    )
    memory: str = Field(
        "", max_length=200, description="Id of a stored memory to start from. The memory's text is not read again."
    )
    keep_memory: bool = Field(False, description="Store the memory after each text.")

    @model_validator(mode="after")
    def _agree(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is used only with stream=true. Remove stream_options, or set stream=true")
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(
                "best_of is not supported. Remove best_of, request several texts with n, and choose a text by its "
                "logprobs"
            )
        return self


class MemoryRequest(_Request):
    """A text of which the server stores a memory."""

    model: str = Field("", description="Name of the model, as /v1/models lists it. Optional.")
    prompt: str | list[Id] = Field(description="A text, or a list of token ids. Ids are used unchanged.")
    memory: str = Field("", max_length=200, description="Id of a stored memory to start from.")


class TokenizeRequest(_Request):
    """A text to convert to ids, with the field names of vLLM."""

    model: str = Field("", description="Name of the model, as /v1/models lists it. Optional.")
    prompt: str = Field(description="The text.")
    add_special_tokens: bool = Field(True, description="Include the token that begins a document, if there is one.")


class DetokenizeRequest(_Request):
    """Ids to convert to text."""

    model: str = Field("", description="Name of the model, as /v1/models lists it. Optional.")
    tokens: list[Id]


class Kept(BaseModel):
    """Stored memory, as a completion describes it: id, length, and time at which it expires."""

    id: str
    tokens: int = Field(description="Number of tokens in the memory, which are the last tokens of the text.")
    expires: int = Field(description="Unix time in seconds at which the memory expires if it is not used before.")


class Logprobs(BaseModel):
    """Log-probabilities of a text's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(
        description="Log-probabilities in nats, or null for a token with nothing before it."
    )
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Number of characters of the text before each token.")


class CompletionChoice(BaseModel):
    """One generated text of a completion."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    memory: Kept | None = None


class Usage(BaseModel):
    """Number of tokens that a request read and generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionResponse(BaseModel):
    """Generated texts of a request. In a stream, each event has a part of one text."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ServedModel(BaseModel):
    """Facts about the model that the server runs."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="Maximum number of tokens of a prompt and its text together.")
    memory_len: int = Field(description="Number of tokens of memory.")
    vocab_size: int
    parameters: int = Field(description="Number of parameters. Tied parameters count once.")
    num_layers: int
    width: int
    num_heads: int
    positions: str
    softmax: Literal["adaptive softmax", "plain softmax"]
    tokenizer: str


class Models(BaseModel):
    """List of models, which has only the served model."""

    object: Literal["list"]
    data: list[ServedModel]


class Tokens(BaseModel):
    """Ids of a text, with the number of ids."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(BaseModel):
    """Text of a list of ids, in the field `prompt` as in vLLM."""

    prompt: str


class TokenizerInfo(BaseModel):
    """Facts that evaluation harnesses request about the tokenizer. No text is read as a special token."""

    vocab_size: int
    eos_token: None
    eos_token_id: int | None = Field(description="Id of the end-of-text token, which also begins a document.")


class MemoryObject(Kept):
    """All facts about a stored memory."""

    object: Literal["memory"]
    model: str
    bytes: int
    created: int


class Deleted(BaseModel):
    """Confirmation that a memory was deleted."""

    id: str
    object: Literal["memory"]
    deleted: bool


class HealthStatus(BaseModel):
    """State of the server: `ok` if it accepts requests, `draining` if it is stopping."""

    status: Literal["ok", "draining"]
    model: str


class ErrorFacts(BaseModel):
    """Facts about an error: what is wrong, in which field, and how to correct it."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Error in the form of OpenAI's API."""

    error: ErrorFacts
