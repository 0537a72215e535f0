"""What the compared systems are asked to do."""

import random
from dataclasses import dataclass

NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 32, 6805, 1993


@dataclass(frozen=True, slots=True)
class StepCase:
    """num_steps 0: the prompt's step is timed; else so many decode steps after it. repeats: in one round."""

    name: str
    num_prompt_tokens: int
    num_sequences: int
    num_steps: int
    repeats: int = 1

    @property
    def num_tokens(self) -> int:
        """Of one timed step."""
        return self.num_sequences if self.num_steps else self.num_prompt_tokens


STEP_CASES = (
    StepCase("prefill 256", 256, 1, 0, repeats=2),
    StepCase("prefill 512", 512, 1, 0),
    StepCase("decode 1 at 256", 256, 1, 24),
    StepCase("decode 8 at 64", 64, 8, 12),
    StepCase("decode 32 at 64", 64, 32, 8),
)
REQUESTS_CASE = "32 requests"
CASE_NAMES = (*(case.name for case in STEP_CASES), REQUESTS_CASE)


def workload() -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths of the 32 requests: the same for every system, and for every run."""
    generator = random.Random(0)
    prompt_lengths = _lengths(NUM_PROMPT_TOKENS, 24, generator)
    output_lengths = _lengths(NUM_OUTPUT_TOKENS, 16, generator)
    prompts = [[generator.randrange(100, 30000) for _ in range(length)] for length in prompt_lengths]
    return prompts, output_lengths


def _lengths(total: int, least: int, generator: random.Random) -> list[int]:
    """One for each request, evenly spread from `least` upwards, shuffled; they add up to `total`."""
    span = 2 * (total / NUM_REQUESTS - least)
    lengths = [least + int(span * i / (NUM_REQUESTS - 1)) for i in range(NUM_REQUESTS)]
    lengths[-1] += total - sum(lengths)
    generator.shuffle(lengths)
    return lengths
