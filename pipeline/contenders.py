"""Open what a user names as candidate or baseline, so that it can be scored.

An engine runs its own kernels and KV cache. Anything else (a model, a quantized checkpoint) is scored by
transformers in fp32, on dequantized weights.
"""

from dataclasses import dataclass
from pathlib import Path

from bitsmith.compile.engine import Engine
from bitsmith.compile.engine_logits import EngineLogitsModel
from bitsmith.compile.reference_model import TransformersGenerator, TransformersLogitsModel
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import MANIFEST_NAME, read_manifest
from bitsmith.core.model_ref import resolve_model, source_digest
from bitsmith.core.progress import Reporter
from bitsmith.core.tokenizer import load_tokenizer
from bitsmith.evaluate.contender import Contender
from bitsmith.serve.generator import EngineGenerator


@dataclass(frozen=True, slots=True)
class ContenderSource:
    """Where a contender is, and what the report calls it."""

    path: Path
    title: str


def find_contender(ref: str, reporter: Reporter, *, accept_terms: bool) -> ContenderSource:
    """An engine, a quantized checkpoint or a model, by what the user called it. Raises Refused otherwise."""
    path = Path(ref)
    if (path / MANIFEST_NAME).is_file():
        kind = read_manifest(path).kind
        if kind == "quality-report":
            raise Refused(f"{path} is a quality report; an engine, a checkpoint or a model is needed here.")
        return ContenderSource(path, ref)
    return ContenderSource(resolve_model(ref, reporter=reporter, accept_terms=accept_terms).path, ref)


def is_engine(path: Path) -> bool:
    return (path / MANIFEST_NAME).is_file() and read_manifest(path).kind == "engine"


def tokenizer_directory(path: Path) -> Path:
    """Where a contender's tokenizer is; needs nothing to be loaded."""
    return path / "tokenizer" if is_engine(path) else path


def open_contender(source: ContenderSource, *, generates: bool, trust_engine: bool) -> Contender:
    """Load it. generates: also make ready to generate text, which some tasks need."""
    path = source.path
    tokenizer = load_tokenizer(tokenizer_directory(path))
    digest = source_digest(path)
    if not is_engine(path):
        reference = TransformersLogitsModel(path)
        reference_generator = TransformersGenerator(reference, tokenizer) if generates else None
        notes = {"notes": " ".join(reference.notes)} if reference.notes else {}
        return Contender(reference, digest, tokenizer, reference_generator, notes, source.title)
    engine = Engine.load(path, trust=trust_engine)
    generator = EngineGenerator(engine, tokenizer, engine.tokenizer_path) if generates else None
    facts = {"arithmetic": engine.arithmetic}
    return Contender(EngineLogitsModel(engine), digest, tokenizer, generator, facts, source.title)
