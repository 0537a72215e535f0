"""The systems of a comparison, each run as a process of its own behind the protocol of `peer_side`.

They are read from a JSON file: [{"kind": "int4", "label": "llama.cpp Q4_0, head Q8_0", "side": "llama_cpp",
"python": PATH, "model": PATH, "options": ["--unified-cache"]}, ...]. kind: what is compared with what,
usually the bits of the weights. side: `SIDE_side.py` of this folder; "bitsmith" is ours. python: an
interpreter that has that system.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

OURS = "bitsmith"


@dataclass(frozen=True, slots=True)
class Peer:
    kind: str
    label: str
    side: str
    python: str
    model: str
    options: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.side == OURS


class Refusal(Exception):
    """The system says that it cannot do what was asked."""


def read_peers(path: Path) -> list[Peer]:
    known = {field.name for field in dataclasses.fields(Peer)}
    entries = json.loads(path.read_text(encoding="utf-8"))
    for entry in entries:
        if unknown := entry.keys() - known:
            raise SystemExit(f"{path} has unknown keys {sorted(unknown)}; valid: {', '.join(sorted(known))}.")
    return [Peer(**{**entry, "options": tuple(entry.get("options", ()))}) for entry in entries]


class PeerProcess:
    """A running side. Between two requests it is stopped, so that threads of its that would spin cannot."""

    def __init__(self, peer: Peer, num_threads: int) -> None:
        script = Path(__file__).with_name(f"{peer.side}_side.py")
        command = [peer.python, str(script), peer.model, "--threads", str(num_threads), *peer.options]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._peer = peer
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=script.parent,
            env=environment | {"OMP_NUM_THREADS": str(num_threads)},
            start_new_session=True,
        )
        facts = self._read()
        self.version: str = facts["version"]
        self.num_bytes: int = facts["num_bytes"]
        self._signal(signal.SIGSTOP)

    def ask(self, **request: Any) -> Any:
        """Raises Refusal."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            message = self._read()
        finally:
            self._signal(signal.SIGSTOP)
        if "refused" in message:
            raise Refusal(message["refused"])
        return message["answer"]

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines()[-15:]
            raise SystemExit("\n".join([f"{self._peer.label} ended. Its last lines:", *said]))
        message: dict[str, Any] = json.loads(line)
        return message

    def _signal(self, number: signal.Signals) -> None:
        """To the side and to all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


@contextmanager
def running(peers: list[Peer], num_threads: int) -> Iterator[list[PeerProcess]]:
    """Loaded one after another, ended together, also where this process is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    processes: list[PeerProcess] = []
    try:
        for peer in peers:
            processes.append(PeerProcess(peer, num_threads))
        yield processes
    finally:
        for process in processes:
            process.close()
