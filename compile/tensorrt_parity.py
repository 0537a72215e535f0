"""Whether a built engine computes what its checkpoint says: greedy next tokens of fixed prompts.

The reference is transformers, in fp32, with the checkpoint's own weights turned back to floats: only the
engine's arithmetic differs. The script that asks the engine runs in the environment that built it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bitsmith.compile.tensorrt_builder import BuildTool
from bitsmith.compile.tensorrt_checkpoint import open_checkpoint
from bitsmith.compile.tensorrt_release import Release
from bitsmith.core.errors import WorkFailed
from bitsmith.core.logged_process import run_logged
from bitsmith.core.progress import Reporter

NUM_PROMPTS, PROMPT_LEN = 32, 16
# Fewer equal tokens than this, among prompts whose best token leads clearly, is a fault and no rounding.
MIN_AGREEMENT = 0.9
# Lead, in logits, below which rounding may decide between two tokens.
CLEAR_LEAD = 0.5

SCRIPT = '''\
"""Greedy next tokens of an engine. Usage: python3 parity.py ENGINE TOKENIZER REFERENCE.json OUT.json"""
import json
import sys

try:
    from tensorrt_llm._tensorrt_engine import LLM
except ImportError:  # releases before 1.0
    from tensorrt_llm import LLM
from tensorrt_llm import SamplingParams

engine, tokenizer, reference, out = sys.argv[1:]
with open(reference) as file:
    prompts = json.load(file)["prompts"]
llm = LLM(model=engine, tokenizer=tokenizer)
params = SamplingParams(max_tokens=1, temperature=0.0, end_id=-1, pad_id=0)
tokens = [llm.generate(prompt, params).outputs[0].token_ids[0] for prompt in prompts]
with open(out, "w") as file:
    json.dump({"tokens": [int(token) for token in tokens]}, file)
'''


def write_reference(path: Path, release: Release, hf_config: Mapping[str, Any], out: Path) -> None:
    """Prompts, their best next token and its lead. path: the checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {name: value for name, value in hf_config.items() if name != "quantization_config"}
    checkpoint = open_checkpoint(path, release)
    state = dict(checkpoint.dequantized())
    make: Any = AutoModelForCausalLM.from_config  # has no types of its own
    model = make(AutoConfig.for_model(**given), dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    vocab_size = checkpoint.model.vocab_size
    prompts = torch.randint(0, vocab_size, (NUM_PROMPTS, PROMPT_LEN), generator=generator)
    with torch.no_grad():
        logits = model(prompts).logits[:, -1]
    best = logits.topk(2, dim=-1)
    body = {
        "prompts": prompts.tolist(),
        "tokens": best.indices[:, 0].tolist(),
        "leads": (best.values[:, 0] - best.values[:, 1]).tolist(),
    }
    out.write_text(json.dumps(body) + "\n", encoding="utf-8")


def run_parity(tool: BuildTool, directory: Path, reporter: Reporter) -> dict[str, Any]:
    """Ask the engine below `directory` for its tokens and compare. Raises WorkFailed when they differ."""
    script, answer = directory / "parity.py", directory / "parity_answer.json"
    reference = directory / "parity_reference.json"
    command = (*tool.python, str(script.resolve()))
    paths = (directory / "engine", directory / "tokenizer", reference, answer)
    run_logged((*command, *(str(path.resolve()) for path in paths)), directory / "build.log", reporter)
    expected = json.loads(reference.read_bytes())
    given = json.loads(answer.read_bytes())["tokens"]
    result = compare_tokens(expected, given)
    if result["agreement"] < MIN_AGREEMENT:
        raise WorkFailed(
            f"The engine's next token equals the checkpoint's for {result['agreement']:.0%} of "
            f"{result['num_compared']} prompts (limit {MIN_AGREEMENT:.0%}): it does not compute this model."
        )
    return result


def compare_tokens(reference: Mapping[str, Any], tokens: list[int]) -> dict[str, Any]:
    """Agreement over the prompts whose best token leads clearly; all of them where none does."""
    rows = list(zip(reference["tokens"], reference["leads"], tokens, strict=True))
    clear = [row for row in rows if row[1] >= CLEAR_LEAD] or rows
    agreement = sum(want == got for want, _, got in clear) / len(clear)
    return {"agreement": agreement, "num_compared": len(clear), "num_prompts": len(rows)}
