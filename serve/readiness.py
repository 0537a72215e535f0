"""Whether requests can be served now, and if not, why. Alive is not ready: ready needs recent progress."""

from enum import StrEnum

from bitsmith.serve.engine_client import EngineClient


class Readiness(StrEnum):
    READY = "ready"
    LOADING = "loading"
    DRAINING = "draining"
    STALLED = "stalled"
    ENGINE_DEAD = "engine_dead"


_REASONS = {
    Readiness.LOADING: "The engine is being loaded.",
    Readiness.DRAINING: "The server is shutting down.",
    Readiness.STALLED: "The engine has made no progress for too long.",
    Readiness.ENGINE_DEAD: "The engine has stopped working.",
}


class ReadinessProbe:
    """is_loaded and is_draining are set by the server as it comes and goes."""

    def __init__(self, client: EngineClient, stall_timeout_s: float) -> None:
        self._client = client
        self._stall_timeout_s = stall_timeout_s
        self.is_loaded = False
        self.is_draining = False

    @property
    def state(self) -> Readiness:
        if self._client.is_dead:
            return Readiness.ENGINE_DEAD
        if self.is_draining:
            return Readiness.DRAINING
        if not self.is_loaded:
            return Readiness.LOADING
        if self._client.silence_s > self._stall_timeout_s:
            return Readiness.STALLED
        return Readiness.READY

    @property
    def is_ready(self) -> bool:
        return self.state is Readiness.READY

    @property
    def reason(self) -> str:
        return _REASONS.get(self.state, "")
