"""What the HTTP process and the engine process say to each other: JSON, checked on arrival, no pickle."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from bitsmith.core.sampling import SamplingParams
from bitsmith.serve.engine_loop import EngineStats
from bitsmith.serve.engine_setup import RuntimeLimits
from bitsmith.serve.request import Request, Vocabulary
from bitsmith.serve.scheduled_step import RequestProgress


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Field by field what Request is made of."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    vocabulary: Vocabulary
    max_output_tokens: int
    seed: int
    wants_prompt_logprobs: bool
    kind: Literal["add"] = "add"

    def to_request(self) -> Request:
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling=self.sampling,
            vocabulary=self.vocabulary,
            max_output_tokens=self.max_output_tokens,
            seed=self.seed,
            wants_prompt_logprobs=self.wants_prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class AbortRequest:
    request_id: str
    kind: Literal["abort"] = "abort"


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a sign of life; answered between two steps."""

    kind: Literal["ping"] = "ping"


@dataclass(frozen=True, slots=True)
class EngineReady:
    """Sent once, when the engine is loaded. refused_fields: of a request body, with the reason."""

    limits: RuntimeLimits
    tokenizer_path: str
    arithmetic: str
    refused_fields: Mapping[str, str] = field(default_factory=dict)
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """Sent instead of EngineReady; exit_code as the contract gives it to the error."""

    text: str
    exit_code: int
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class StepReport:
    """After a step, or in answer to a ping (then without progress)."""

    progress: tuple[RequestProgress, ...]
    stats: EngineStats
    kind: Literal["step"] = "step"


ToEngine = AddRequest | AbortRequest | Ping
FromEngine = EngineReady | EngineFailed | StepReport

_to_engine: TypeAdapter[ToEngine] = TypeAdapter(Annotated[ToEngine, Field(discriminator="kind")])
_from_engine: TypeAdapter[FromEngine] = TypeAdapter(Annotated[FromEngine, Field(discriminator="kind")])


def encode_to_engine(message: ToEngine) -> bytes:
    return _to_engine.dump_json(message)


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.validate_json(data)


def encode_from_engine(message: FromEngine) -> bytes:
    return _from_engine.dump_json(message)


def decode_from_engine(data: bytes) -> FromEngine:
    return _from_engine.validate_json(data)
