"""The two generation routes: read, plan, run, write. Knows HTTP bodies, not sockets."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bitsmith.serve.answer_format import AnswerFormat, usage_fields
from bitsmith.serve.api_bodies import ChatCompletionBody, CompletionBody, GenerationBody
from bitsmith.serve.api_errors import ApiError
from bitsmith.serve.chat_format import ChatFormat
from bitsmith.serve.choice_plan import ChoicePlanner
from bitsmith.serve.completion_format import CompletionFormat
from bitsmith.serve.event_stream import DONE_EVENT, EventStream, encode_event, unless_client_leaves
from bitsmith.serve.generation import Generation, GenerationService
from bitsmith.serve.prompt_encoder import PromptEncoder
from bitsmith.serve.request_reader import parse_body, read_body
from bitsmith.serve.serve_settings import ServeSettings
from bitsmith.serve.text_collector import TextDelta
from bitsmith.serve.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What exists once the engine is ready."""

    encoder: PromptEncoder
    planner: ChoicePlanner
    service: GenerationService
    token_bytes: TokenBytes
    max_model_len: int
    arithmetic: str


class GenerationApi:
    """Handlers of POST /v1/chat/completions and POST /v1/completions."""

    def __init__(
        self, settings: ServeSettings, model: LoadedModel, on_failure: Callable[[Exception], ApiError]
    ) -> None:
        """on_failure: reports an unexpected error and says what the client is told of it."""
        self._settings = settings
        self._on_failure = on_failure
        self._model = model

    async def chat(self, request: Request) -> Response:
        with self._place():
            body = parse_body(await read_body(request, self._settings.max_body_bytes), ChatCompletionBody)
            self._check_model(body)
            prompts = [await self._model.encoder.encode_chat(body.messages)]
            generation = self._plan(body, prompts)
        return await self._answer(request, body, generation, ChatFormat(body, self._model.token_bytes))

    async def complete(self, request: Request) -> Response:
        with self._place():
            body = parse_body(await read_body(request, self._settings.max_body_bytes), CompletionBody)
            self._check_model(body)
            generation = self._plan(body, await self._prompts(body))
        return await self._answer(request, body, generation, CompletionFormat(body, self._model.token_bytes))

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Refuses early when the server is full, and counts requests whose prompts are being read."""
        self._model.service.hold_place()
        try:
            yield
        finally:
            self._model.service.release_place()

    def _check_model(self, body: GenerationBody) -> None:
        if body.model != self._settings.model_name:
            raise ApiError(
                404,
                f"model: this server has only {self._settings.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    async def _prompts(self, body: CompletionBody) -> list[list[int]]:
        """Ids are taken as they are: no BOS and no template is added to them."""
        prompt = body.prompt
        texts = [prompt] if isinstance(prompt, str) else [part for part in prompt if isinstance(part, str)]
        if texts:
            return await self._model.encoder.encode_texts(texts)
        flat = [part for part in prompt if isinstance(part, int)]
        return [flat] if flat else [part for part in prompt if isinstance(part, list)]

    def _plan(self, body: GenerationBody, prompts: list[list[int]]) -> Generation:
        return Generation(self._model.planner.plan(body, prompts))

    async def _answer(
        self, request: Request, body: GenerationBody, generation: Generation, answer: AnswerFormat
    ) -> Response:
        self._model.service.admit(len(generation.choices))
        if body.stream:
            events = self._events(body, generation, answer)
            return EventStream(events, self._settings.send_timeout_s)
        return await unless_client_leaves(self._whole(generation, answer), request)

    async def _whole(self, generation: Generation, answer: AnswerFormat) -> Response:
        deltas: dict[int, list[TextDelta]] = {choice.index: [] for choice in generation.choices}
        async with aclosing(self._model.service.run(generation)) as news:
            async for choice, delta in news:
                deltas[choice.index].append(delta)
        choices = [answer.whole(choice, deltas[choice.index]) for choice in generation.choices]
        return JSONResponse(answer.head.wrap(choices) | {"usage": usage_fields(generation.usage)})

    async def _events(
        self, body: GenerationBody, generation: Generation, answer: AnswerFormat
    ) -> AsyncGenerator[bytes]:
        """Parts, then (when asked for) one with the usage and no choices, then the end mark.

        Once the stream has begun its status is sent, so an error comes as an event, and ends it.
        """
        suffix = answer.chunk_suffix
        no_usage = {"usage": None} if body.include_usage else {}
        try:
            for choice in generation.choices:
                if (opening := answer.opening(choice)) is not None:
                    yield encode_event(answer.head.wrap([opening], suffix) | no_usage)
            async with aclosing(self._model.service.run(generation)) as news:
                async for choice, delta in news:
                    if (part := answer.part(choice, delta)) is not None:
                        yield encode_event(answer.head.wrap([part], suffix) | no_usage)
        except ApiError as error:
            yield encode_event(error.body)
            return
        except Exception as error:
            yield encode_event(self._on_failure(error).body)
            return
        if body.include_usage:
            usage = {"usage": usage_fields(generation.usage)}
            yield encode_event(answer.head.wrap([], suffix) | usage)
        yield DONE_EVENT
