"""Prompts -> token ids, off the event loop, with a time limit: no prompt stalls the others' streams."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from bitsmith.core.errors import Refused
from bitsmith.core.tokenizer import render_chat
from bitsmith.serve.api_bodies import ChatMessage
from bitsmith.serve.api_errors import ApiError, bad_field

Result = TypeVar("Result")

_NUM_THREADS = 2
_TIMEOUT_S = 20.0


class PromptEncoder:
    """Wraps the tokenizer; the chat template runs in core's sandboxed renderer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Raises ApiError 400 with the template's own words when it refuses the messages."""
        conversation: list[dict[str, Any]] = [
            {"role": message.role, "content": message.text}
            | ({"name": message.name} if message.name is not None else {})
            for message in messages
        ]
        return await self._run("messages", lambda: self._render(conversation))

    async def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """As the tokenizer itself does it: with BOS when it adds one."""
        return await self._run("prompt", lambda: [self._encode(text) for text in texts])

    def _render(self, conversation: list[dict[str, Any]]) -> list[int]:
        try:
            return render_chat(self._tokenizer, conversation)
        except Refused as error:
            raise bad_field("messages", str(error)) from None
        except Exception as error:  # a template is a program, and may fail in any way
            raise bad_field(
                "messages", f"The model's chat template failed on them ({type(error).__name__})."
            ) from None

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text).input_ids
        return token_ids

    async def _run(self, param: str, work: Callable[[], Result]) -> Result:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError:
            raise ApiError(400, f"{param}: not tokenized within {_TIMEOUT_S:g} s.", param=param) from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
