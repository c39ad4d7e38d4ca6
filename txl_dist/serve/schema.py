"""What clients send and get: OpenAI's completions, with vLLM's names for what those lack, and memories.

Requests are read strictly: a text is no number, and an unknown field is refused. A field that is null counts as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Stop = Annotated[str, Field(min_length=1, max_length=64)]
Id = Annotated[int, Field(ge=0, lt=2**32)]
PromptField = str | list[str] | list[Id] | list[list[Id]]
_PROMPT = "A text, a list of texts, the ids of a text, which are taken as they are, or a list of such."
_FORMS = "give a text, a list of texts, a list of ids, or a list of lists of ids"


def _nullable(schema: dict[str, Any]) -> None:
    """Optional fields may be null."""
    for name, field in schema.get("properties", {}).items():
        if name not in schema.get("required", []):
            kept = {key: field.pop(key) for key in ("description", "title", "default") if key in field}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **kept}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_nullable)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return (
            {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
        )

    @field_validator("prompt", mode="wrap", check_fields=False)
    @classmethod
    def _one_message(cls, value: Any, check: Any, info: ValidationInfo) -> Any:
        try:
            return check(value)
        except ValueError:
            raise ValueError(_FORMS) from None


class StreamOptions(_Request):
    """How a stream ends."""

    include_usage: bool = Field(False, description="One more chunk at the end, with the usage.")
    include_obfuscation: bool = Field(
        False, description="Random characters in each chunk, so that its size does not give its text away."
    )


class CompletionRequest(_Request):
    """A prompt, or several, and how to go on with it."""

    model: str = Field("", description="The model's name, as /v1/models has it; may be left out.")
    prompt: PromptField = Field("", description=_PROMPT + ' Without it, or for "", a document is begun.')
    max_tokens: int = Field(16, ge=0, lt=2**31, description="Most tokens to make; 0 makes none.")
    temperature: float = Field(1.0, ge=0, description="0 takes the likeliest token.")
    top_p: float = Field(1.0, gt=0, le=1, description="Keep the fewest likeliest tokens that sum to this.")
    n: int = Field(1, ge=1, lt=2**31, description="Texts of each prompt.")
    stream: bool = Field(False, description="Pieces of text as they are made, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    logprobs: int | None = Field(None, ge=0, lt=2**31, description="Tell so many of the likeliest with each token.")
    echo: bool = Field(False, description="The text begins with the prompt; with logprobs of its tokens too.")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] = Field(
        [], description="The text ends before the first of these."
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="The same seed gives the same text.")
    user: str = Field("", description="Accepted without effect.")
    metadata: dict[str, Any] = Field({}, description="Accepted without effect.")
    store: bool = Field(False, description="Accepted without effect: no completion is stored.")
    safety_identifier: str = Field("", description="Accepted without effect.")
    service_tier: str = Field("", description="Accepted without effect: there is one tier.")
    prompt_cache_key: str = Field("", description="Accepted without effect: memories are named by `memory`.")
    prompt_cache_options: dict[str, Any] = Field({}, description="Accepted without effect.")
    prompt_cache_retention: str = Field("", description="Accepted without effect.")
    suffix: str = Field("", max_length=0, description="Not supported: nothing can be put into a text.")
    best_of: int | None = Field(None, ge=1, lt=2**31, description="Not supported, but for the value of n.")
    presence_penalty: float = Field(0.0, ge=0, le=0, description="Not supported: there is repetition_penalty.")
    frequency_penalty: float = Field(0.0, ge=0, le=0, description="Not supported: there is repetition_penalty.")
    logit_bias: dict[str, float] = Field({}, max_length=0, description="Not supported: there is allowed_token_ids.")
    top_k: int = Field(0, ge=-1, lt=2**31, description="Keep so many of the likeliest tokens; 0 or -1 keeps all.")
    min_p: float = Field(0.0, ge=0, le=1, description="Keep tokens so many times as likely as the likeliest.")
    repetition_penalty: float = Field(
        1.0, ge=1, le=1000, description="Multiplies the log-probability of tokens that were there already."
    )
    allowed_token_ids: list[Id] = Field([], max_length=4096, description="No other tokens are made; none allows all.")
    memory: str = Field("", max_length=200, description="Begin from this memory; its text is not read again.")
    keep_memory: bool = Field(False, description="Keep what is remembered of each prompt and its text.")

    @model_validator(mode="after")
    def _agree(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams. Leave them out, or ask for stream")
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of is not supported. Leave it out, and choose of n texts by their logprobs")
        return self


class MemoryRequest(_Request):
    """A text to remember."""

    model: str = Field("", description="The model's name, as /v1/models has it; may be left out.")
    prompt: str | list[Id] = Field(description="A text, or its ids, which are taken as they are.")
    memory: str = Field("", max_length=200, description="What was read before it.")


class TokenizeRequest(_Request):
    """A text whose ids are asked for, by vLLM's names."""

    model: str = Field("", description="The model's name, as /v1/models has it; may be left out.")
    prompt: str = Field(description="The text.")
    add_special_tokens: bool = Field(True, description="With what is put before a text, where a document begins.")


class DetokenizeRequest(_Request):
    """Ids whose text is asked for."""

    model: str = Field("", description="The model's name, as /v1/models has it; may be left out.")
    tokens: list[Id]


class Kept(BaseModel):
    """A memory that is kept."""

    id: str
    tokens: int = Field(description="So many are remembered; of a longer text the last.")
    expires: int = Field(description="Unix time in seconds, if nobody uses it before.")


class Logprobs(BaseModel):
    """Of the tokens of a text."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="In nats; null where nothing stands before.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Characters of the text before each token.")


class CompletionChoice(BaseModel):
    """A text."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    memory: Kept | None = None


class Usage(BaseModel):
    """Tokens that were read and made."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """The texts of a request; of a stream, a piece of one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="Most tokens of a prompt and its text.")
    memory_len: int = Field(description="Tokens of the past that are seen.")
    vocab_size: int
    parameters: int = Field(description="Number of weights; a weight that is used twice counts once.")
    num_layers: int
    width: int
    num_heads: int
    positions: str
    softmax: Literal["adaptive softmax", "plain softmax"]
    tokenizer: str


class Models(BaseModel):
    """One."""

    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    """The ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(BaseModel):
    """The text of ids."""

    prompt: str


class TokenizerInfo(BaseModel):
    """What harnesses ask of a tokenizer. No special token has a text that would be read as it."""

    vocab_size: int
    eos_token: None
    eos_token_id: int | None = Field(description="Of the end-of-text, which also begins a document.")


class MemoryObject(Kept):
    """Facts of a memory."""

    object: Literal["memory"]
    model: str
    bytes: int
    created: int


class Deleted(BaseModel):
    """A memory is gone."""

    id: str
    object: Literal["memory"]
    deleted: bool


class HealthStatus(BaseModel):
    """Whether requests are taken."""

    status: Literal["ok", "draining"]
    model: str


class ErrorFacts(BaseModel):
    """What is wrong, where, and what to do."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """In OpenAI's form."""

    error: ErrorFacts
