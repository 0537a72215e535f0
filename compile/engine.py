"""A compiled engine in this process: logits of flat batches over a paged KV cache.

Not known here: requests, scheduling, sampling, text.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitsmith.compile.decoder import Decoder
from bitsmith.compile.decoder_plan import PLAN_NAME, DecoderPlan
from bitsmith.compile.engine_checks import check_engine
from bitsmith.compile.kv_cache import KVCache, allocate_kv_cache
from bitsmith.compile.limits import EngineLimits
from bitsmith.compile.step_runner import CompiledRunner, EagerRunner, StepRunner
from bitsmith.compile.weight_files import read_weights
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import Manifest
from bitsmith.core.model_input import ModelInput
from bitsmith.ops.library import LIBRARY_NAME, load_operators

PACKAGE_NAME = "model.pt2"
TOKENIZER_DIR = "tokenizer"
PARITY_NAME = "parity.json"


@dataclass(slots=True)
class Engine:
    """One decoder ready to run. The KV cache is allocated by its user, who knows how much memory to spend.

    weights: the packed tensors by the decoder's names, which the runner uses where they lie.
    """

    plan: DecoderPlan
    limits: EngineLimits
    arithmetic: str
    tokenizer_path: Path
    weights: Mapping[str, Tensor]
    runner: StepRunner
    manifest: Manifest | None = None
    _kv_cache: KVCache | None = field(default=None, init=False)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        trust: bool = False,
        num_threads: int | None = None,
        enforce_eager: bool = False,
    ) -> "Engine":
        """Check everything, then load. trust: also take an engine that was not built here by this user.

        num_threads None: as the engine was compiled. enforce_eager: run the module without its compiled form.
        """
        if num_threads is not None and num_threads < 1:
            raise Refused(f"num_threads is {num_threads}; it must be at least 1.")
        manifest = check_engine(path, trust=trust)
        facts = {"limits": manifest.config["limits"], "arithmetic": manifest.details["arithmetic"]}
        engine = cls.from_directory(path, facts, enforce_eager=enforce_eager)
        apply_num_threads(num_threads or manifest.config["num_threads"])
        engine.manifest = manifest
        return engine

    @classmethod
    def from_directory(cls, path: Path, facts: Mapping[str, Any], *, enforce_eager: bool) -> "Engine":
        """Load the files of an engine without any check; facts: its limits and its line of arithmetic."""
        load_operators(path / LIBRARY_NAME)
        plan = DecoderPlan.from_json((path / PLAN_NAME).read_text(encoding="utf-8"))
        tensors = read_weights(path)
        decoder = Decoder(plan, tensors).eval()
        runner = EagerRunner(decoder) if enforce_eager else CompiledRunner(path / PACKAGE_NAME, decoder)
        return cls(
            plan=plan,
            limits=EngineLimits(**facts["limits"]),
            arithmetic=facts["arithmetic"],
            tokenizer_path=path / TOKENIZER_DIR,
            weights=tensors,
            runner=runner,
        )

    @property
    def vocab_size(self) -> int:
        return self.plan.config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    @property
    def max_num_tokens(self) -> int:
        return self.limits.max_num_tokens

    @property
    def max_batch_size(self) -> int:
        return self.limits.max_batch_size

    @property
    def weight_bytes_per_token(self) -> int:
        """A step reads all weights once; of an embedding table that is no head, only a row for each token."""
        num_bytes = sum(tensor.nbytes for tensor in self.weights.values())
        return num_bytes if self.plan.shares_embedding else num_bytes - self.weights["embedding"].nbytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.plan.kv_bytes_per_token

    def new_kv_cache(self, num_blocks: int) -> KVCache:
        """A cache of one's own, to be handed to `execute`."""
        return allocate_kv_cache(self.plan, num_blocks)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """The cache that `execute` uses where none is handed to it; an earlier one is dropped."""
        self._kv_cache = None
        self._kv_cache = self.new_kv_cache(num_blocks)

    def execute(self, model_input: ModelInput, kv_cache: KVCache | None = None) -> Tensor:
        """Logits [L, vocab_size] fp32 of the rows that `logits_indices` names. Refused beyond a limit."""
        cache = self._kv_cache if kv_cache is None else kv_cache
        assert cache is not None, "allocate_kv_cache comes before execute"
        self._check_limits(model_input)
        if model_input.token_ids.numel() == 0:
            return torch.empty((0, self.vocab_size))
        return self.runner.run(model_input, cache)

    def _check_limits(self, model_input: ModelInput) -> None:
        num_tokens, num_requests = model_input.token_ids.numel(), model_input.seq_lens.numel()
        longest = int(model_input.seq_lens.max()) if num_requests else 0
        for name, value, limit in (
            ("tokens", num_tokens, self.limits.max_num_tokens),
            ("requests", num_requests, self.limits.max_batch_size),
            ("tokens in one request", longest, self.limits.max_model_len),
        ):
            if value > limit:
                raise Refused(f"A step has {value} {name}; the engine was compiled for at most {limit}.")


def apply_num_threads(num_threads: int | None) -> None:
    """Set how many threads the operators use, and torch. None: all processors that this process may use.

    Comes after `load_operators`.
    """
    count = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    torch.ops.bitsmith.set_num_threads(count)


def leave_threads_to_operators() -> None:
    """For a process that only runs an engine: torch's own threads would spin beside the operators'."""
    torch.set_num_threads(1)
