"""What a user may set of the runtime and of the server. Checked here; "auto" (None) is resolved elsewhere,
into a new object."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bitsmith.core.errors import Refused

Speculate = Literal["none", "ngram"]


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """The engine process's part. None: chosen from the engine's limits and the machine's memory.

    kv_cache_bytes: for keys and values of all requests together.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    prefix_caching: bool = True
    speculate: Speculate = "none"
    num_speculative_tokens: int = 5

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Refused(f"{name} is {value}; it must be at least 1.")
        if self.speculate not in ("none", "ngram"):
            raise Refused(f"speculate is {self.speculate!r}; valid values: none, ngram.")
        if not 1 <= self.num_speculative_tokens <= 16:
            raise Refused(
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must be between 1 and 16."
            )


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The whole server.

    served_model_name None: the engine directory's name. max_num_waiting: requests that may wait beyond those
    that run; further ones get 429. drain_timeout_s: how long live answers may go on after SIGTERM.
    stall_timeout_s: without news from the engine for so long, /health says 503. send_timeout_s: a client that
    takes nothing for so long is left.
    """

    engine_path: Path
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key_file: Path | None = None
    trust_engine: bool = False
    num_threads: int | None = None
    runtime: RuntimeSettings = RuntimeSettings()
    max_num_waiting: int = 256
    max_body_bytes: int = 4 << 20
    drain_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    send_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise Refused(f"port is {self.port}; it must be between 0 and 65535.")
        for name in ("max_num_waiting", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise Refused(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("drain_timeout_s", "stall_timeout_s", "send_timeout_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise Refused(f"{name} is {getattr(self, name)}; it must be above 0 s and below 1e6 s.")
        if self.num_threads is not None and self.num_threads < 1:
            raise Refused(f"num_threads is {self.num_threads}; it must be at least 1.")

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.engine_path.resolve().name
