"""What a compile will do, known in seconds and before anything is written; refuses what cannot work."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bitsmith.compile.arithmetic import (
    KVCacheChoice,
    KVScale,
    is_quantized,
    resolve_activations,
    resolve_kv_cache,
)
from bitsmith.compile.decoder_config import DecoderConfig, read_decoder_config
from bitsmith.compile.decoder_plan import Activations, HeadType, KVCacheType
from bitsmith.compile.kv_cache import BLOCK_LAYOUT
from bitsmith.compile.limits import EngineLimits, LimitRow, resolve_limits
from bitsmith.compile.lm_head import check_head
from bitsmith.compile.packing import check_names
from bitsmith.core.digest import sha256_bytes, sha256_file, stage_key
from bitsmith.core.errors import Refused
from bitsmith.core.model_ref import source_digest
from bitsmith.core.versions import TESTED_TORCH, result_versions
from bitsmith.ops.isa import enabled_isa
from bitsmith.ops.library import COMPILE_FLAGS, OPERATORS_INTERFACE, SOURCES_DIR, find_compiler
from bitsmith.ops.packing import LAYOUT_ROWS16
from bitsmith.quantize.kv_scales import KV_GRID_END
from bitsmith.quantize.weight_source import WeightSource, open_weights

_COMPILER_BYTES = 3 << 30  # what the compiler needs beside the weights
_PACKAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A compile as asked for. checkpoint: a quantized checkpoint or a dense model directory.

    max_model_len None: the model's context. num_threads None: all processors at load time.
    lm_head: the head as the checkpoint has it, or rounded to int8.
    """

    checkpoint: Path
    out: Path
    kv_cache: Literal["auto"] | KVCacheType = "auto"
    activations: Literal["auto"] | Activations = "auto"
    max_batch_size: int = 32
    max_num_tokens: int = 1024
    max_model_len: int | None = None
    kv_scale: KVScale = "calibrated"
    num_threads: int | None = None
    lm_head: HeadType = "checkpoint"


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """Every setting resolved. config: what enters the stage key. warnings: sentences for the user."""

    source: WeightSource
    decoder: DecoderConfig
    activations: Activations
    lm_head: HeadType
    kv: KVCacheChoice
    limits: EngineLimits
    limit_rows: tuple[LimitRow, ...]
    parents: Mapping[str, str]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def stage_key(self) -> str:
        return stage_key(list(self.parents.values()), self.config, self.versions)


def plan_compile(job: CompileJob) -> CompilePlan:
    """Resolve a job. Raises Refused for whatever can be known to fail."""
    source = open_weights(job.checkpoint)
    decoder = read_decoder_config(source.config)
    check_names(source, decoder)
    kv = resolve_kv_cache(source, decoder, job.kv_cache, job.kv_scale)
    activations = resolve_activations(
        job.activations,
        is_quantized=is_quantized(source, decoder),
        is_fp8=source.fp8_activations is not None,
        int8_inputs=source.int8_activations,
    )
    check_head(source, decoder, job.lm_head, activations)
    if job.num_threads is not None and job.num_threads < 1:
        raise Refused(f"num_threads is {job.num_threads}; it must be at least 1.")
    limits, rows = resolve_limits(decoder, job.max_batch_size, job.max_num_tokens, job.max_model_len)
    isa = enabled_isa(find_compiler(), COMPILE_FLAGS)
    _check_room(job, decoder)
    config = {
        "target": "cpu",
        "kv_cache": kv.kv_cache,
        "kv_scale": job.kv_scale,
        "activations": activations,
        "lm_head": job.lm_head,
        "limits": asdict(limits),
        "num_threads": job.num_threads,
        "block_layout": BLOCK_LAYOUT,
        "weight_layout": LAYOUT_ROWS16,
        "operators_interface": OPERATORS_INTERFACE,
        "torch": torch.__version__,
        "isa": list(isa),
    }
    return CompilePlan(
        source=source,
        decoder=decoder,
        activations=activations,
        lm_head=job.lm_head,
        kv=kv,
        limits=limits,
        limit_rows=rows,
        parents={"checkpoint": source_digest(job.checkpoint)},
        config=config,
        versions=result_versions("torch", "transformers") | {"operators": _operator_sources_digest()},
        warnings=(*source.notes, *_warnings(kv)),
    )


def _warnings(kv: KVCacheChoice) -> tuple[str, ...]:
    warnings = []
    if not torch.__version__.startswith(TESTED_TORCH):
        warnings.append(f"torch {torch.__version__} is untested here; {TESTED_TORCH} is what was tested.")
    if kv.kv_cache in KV_GRID_END and not kv.are_calibrated:
        text = f"the {kv.kv_cache} KV cache has uncalibrated scales of one, as asked"
        rounds = ": keys and values are rounded to whole numbers" if kv.kv_cache == "int8" else ""
        warnings.append(f"{text}{rounds}.")
    return tuple(warnings)


def _operator_sources_digest() -> str:
    digests = [sha256_file(path) for path in sorted(SOURCES_DIR.iterdir()) if path.is_file()]
    return sha256_bytes("".join(digests).encode())


def num_weights(config: DecoderConfig) -> int:
    """Weights of the decoder, biases and norms left out."""
    heads = config.num_heads * 2 + config.num_kv_heads * 2
    layer = config.hidden_size * (heads * config.head_size + 3 * config.intermediate_size)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.is_tied else 2)
    return config.num_layers * layer + embeddings


def _check_room(job: CompileJob, config: DecoderConfig) -> None:
    """Refuse when disk or memory will not do. The fp32 reference of the parity check is what needs memory."""
    needed_disk = _PACKAGE_BYTES + sum(path.stat().st_size for path in job.checkpoint.glob("*.safetensors"))
    parent = next(path for path in job.out.absolute().parents if path.exists())
    free_disk = shutil.disk_usage(parent).free
    if free_disk < needed_disk:
        raise Refused(f"{parent} has {free_disk >> 20} MiB free; the engine needs about {needed_disk >> 20}.")
    needed_memory = _COMPILER_BYTES + 6 * num_weights(config)
    total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total_memory < needed_memory:
        raise Refused(
            f"This machine has {total_memory >> 20} MiB of memory; compiling and checking this model against "
            f"its fp32 reference needs about {needed_memory >> 20}."
        )
