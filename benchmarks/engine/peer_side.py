"""One system's side of the comparison of peers: JSON lines over a pipe. Imports the standard library only.

First line out: {"version": str, "num_bytes": int}, the second being what lies on disk. Then one answer for
each request in, {"answer": ...} or {"refused": why}:
  {"do": "steps", "num_prompt_tokens", "num_sequences", "num_steps"}   seconds of each, see `System.steps`
  {"do": "requests", "prompts": [[id]], "num_output_tokens": [int]}    seconds of them all
  {"do": "logits", "token_ids": [id], "file": PATH}                    writes fp32 [tokens, vocabulary]
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol


class CannotRun(Exception):
    """What was asked is beyond this system; the text says why."""


class System(Protocol):
    version: str
    num_bytes: int

    def steps(self, num_prompt_tokens: int, num_sequences: int, num_steps: int) -> list[float]:
        """Seconds of each decode step of all sequences, after their prompts.

        num_steps 0: of the prompts, one by one. A step ends with the greedy choice of the next ids.
        """
        ...

    def requests(self, prompts: list[list[int]], num_output_tokens: list[int]) -> float:
        """Seconds until all, which come at once, are answered: greedily, in full length, nothing reused."""
        ...

    def logits(self, token_ids: list[int]) -> Any:
        """fp32 array [tokens, vocabulary]."""
        ...


def serve(load: Callable[[], System]) -> None:
    """Answer until standard input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    system = load()
    _say(answers, {"version": system.version, "num_bytes": system.num_bytes})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": _do(system, request)}
        except CannotRun as error:
            answer = {"refused": str(error)}
        _say(answers, answer)
    answers.close()
    os._exit(0)  # some of these libraries hang or crash in their own clean-up


def _do(system: System, request: dict[str, Any]) -> Any:
    if request["do"] == "steps":
        return system.steps(request["num_prompt_tokens"], request["num_sequences"], request["num_steps"])
    if request["do"] == "requests":
        return system.requests(request["prompts"], request["num_output_tokens"])
    assert request["do"] == "logits", request
    system.logits(request["token_ids"]).astype("float32").tofile(request["file"])
    return None


def _say(channel: Any, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=channel, flush=True)


def bytes_of(directory: str, suffixes: tuple[str, ...]) -> int:
    """Sizes of the files of a directory that end so."""
    with os.scandir(directory) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith(suffixes))


def same_prompts(num_prompt_tokens: int, num_sequences: int) -> list[list[int]]:
    """Prompts of one length that share no first block, so that no cache of prefixes helps."""
    return [
        [(100 + 7 * sequence + 3 * t) % 30000 + 100 for t in range(num_prompt_tokens)]
        for sequence in range(num_sequences)
    ]
