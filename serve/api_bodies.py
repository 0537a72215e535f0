"""Request bodies of the two generation routes. Every field is applied or refused; ranges stand here."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_LOGIT_BIASES = 1024

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class GenerationBody(BaseModel):
    """What both routes share. Beyond OpenAI's: top_k, min_p, ignore_eos, stop_token_ids.

    user, metadata, safety_identifier, prompt_cache_key and store=false are accepted and have no effect here:
    nothing is stored.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    refusals: ClassVar[dict[str, str]] = {}

    model: str
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] = []
    ignore_eos: bool = False
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=MAX_LOGIT_BIASES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_supported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        return {key: value for key, value in body.items() if value is not None or key == "model"}

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias")
    @classmethod
    def _biases_name_ids(cls, value: dict[str, float]) -> dict[str, float]:
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError("keys must be token ids written as decimal numbers")
        return value

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is valid only with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """/v1/completions. max_tokens defaults to 16, as OpenAI's does; 0 is allowed with echo (scoring)."""

    refusals: ClassVar[dict[str, str]] = {
        "best_of": "best_of is not supported; use n.",
        "suffix": "suffix (text insertion) is not supported.",
    }

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("prompt")
    @classmethod
    def _prompt_is_not_empty(cls, value: Any) -> Any:
        if not value or any(part in ("", []) for part in value):
            raise ValueError("an empty prompt cannot be continued")
        return value


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """Text only; content parts of type text are joined, other types (images) are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionBody(GenerationBody):
    """/v1/chat/completions. Without a limit the answer may fill the context."""

    refusals: ClassVar[dict[str, str]] = {
        name: f"{name} is not supported by this server."
        for name in (
            *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
            *("modalities", "audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"),
            *("service_tier", "chat_template", "chat_template_kwargs"),
        )
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: dict[str, Any] | None = None

    @field_validator("response_format")
    @classmethod
    def _only_text(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value not in (None, {"type": "text"}):
            raise ValueError('only {"type": "text"} is supported; structured output is not')
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatCompletionBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is valid only with logprobs: true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self
