"""A model whose next-token logits depend on every token of the history, read back through the paged cache.

The cache cell of a token holds its id and position. A row's logits are a fixed function of the cells that the
block table and the sequence length name, so one wrong slot, block or length changes them. Run as a script it
is the engine process of the HTTP tests.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bitsmith.core.model_input import BLOCK_SIZE, ModelInput

_PRIME = 2_147_483_629


@dataclasses.dataclass
class FakeModel:
    """cycle_strength: how much the next token follows from the last one alone, so that texts repeat.
    step_s: how long a step takes. die_at_token: an id at which the process ends."""

    vocab_size: int = 300
    max_model_len: int = 512
    max_num_tokens: int = 64
    max_batch_size: int = 8
    cycle_strength: float = 0.0
    step_s: float = 0.0
    die_at_token: int = -1
    kv_bytes_per_token: int = 16
    arithmetic: str = "fake"
    num_steps: int = 0
    step_sizes: list[int] = dataclasses.field(default_factory=list)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self.cells = torch.full((num_blocks * BLOCK_SIZE, 2), -1, dtype=torch.int64)
        generator = torch.Generator().manual_seed(5)
        self.mix = torch.randint(1, _PRIME, (self.max_model_len + 1, 2), generator=generator)
        self.per_id = torch.randint(1, _PRIME, (2, self.vocab_size), generator=generator)
        self.successor = (torch.arange(self.vocab_size) + 1) % 6

    def execute(self, model_input: ModelInput) -> torch.Tensor:
        self.num_steps += 1
        self.step_sizes.append(len(model_input.token_ids))
        assert len(model_input.token_ids) <= self.max_num_tokens
        assert len(model_input.seq_lens) <= self.max_batch_size
        if self.die_at_token in model_input.token_ids.tolist():
            sys.exit(3)
        time.sleep(self.step_s)
        tokens_and_positions = torch.stack((model_input.token_ids, model_input.positions), dim=1)
        self.cells[model_input.slot_mapping] = tokens_and_positions
        logits = torch.empty(len(model_input.logits_indices), self.vocab_size)
        starts = model_input.query_start_loc.tolist()
        for row, index in enumerate(model_input.logits_indices.tolist()):
            request = next(r for r in range(len(starts) - 1) if starts[r] <= index < starts[r + 1])
            # tokens after this one in the same step are in the cache too, but may not be seen
            num_seen = int(model_input.seq_lens[request]) - (starts[request + 1] - 1 - index)
            assert num_seen == int(model_input.positions[index]) + 1
            logits[row] = self.row_logits(self.history(model_input.block_table[request], num_seen))
        return logits

    def history(self, block_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        positions = torch.arange(num_tokens)
        slots = block_ids[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        return self.cells[slots]

    def row_logits(self, cells: torch.Tensor) -> torch.Tensor:
        """cells: [n, 2] -> [vocab_size]."""
        mixed = ((cells + 1) * self.mix[: len(cells)] % _PRIME).sum() % _PRIME
        noise = (mixed * self.per_id[0] + self.per_id[1]) % _PRIME
        logits = noise.double() / _PRIME * 6
        logits[self.successor[cells[-1, 0]]] += self.cycle_strength
        return logits.float()

    def logits_of(self, token_ids: Sequence[int]) -> torch.Tensor:
        """What the model says after these tokens, without any cache."""
        cells = torch.stack((torch.tensor(token_ids), torch.arange(len(token_ids))), dim=1)
        return self.row_logits(cells)


def _load(path: Path, num_threads: int | None, *, trust: bool) -> tuple[FakeModel, Path]:
    from bitsmith.core.errors import Refused

    del num_threads, trust
    config = json.loads((path / "fake.json").read_text())
    if "refuse" in config:
        raise Refused(config["refuse"])
    return FakeModel(**config), path / "tokenizer"


if __name__ == "__main__":
    from bitsmith.serve.engine_process import run_engine_process

    torch.set_num_threads(1)
    run_engine_process(_load)
