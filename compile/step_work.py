"""What one step has to do, operator by operator: bytes that come from memory, and arithmetic operations.

Bytes are those of weights and of the KV cache, each counted once; activations stay in the processor's caches
and are not counted. Operations are those of the products: a multiply-add is two. Nothing is measured here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bitsmith.compile.batch import RequestStep
from bitsmith.compile.decoder_plan import DecoderPlan, LinearSpec

Role = Literal["qkv", "cache_write", "attention", "output", "gate_up", "activation", "down", "head"]
Arithmetic = Literal["fp32", "int8"]
StoredBytes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator within a step. operator: its name in torch. arithmetic: of its products."""

    operator: str
    role: Role
    arithmetic: Arithmetic
    num_bytes: int
    num_operations: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """calls: in the order in which a step makes them. generated_bytes: what the generated code between them
    reads, which is one row of the embedding for each token, and the norms."""

    calls: tuple[OperatorCall, ...]
    generated_bytes: int


def step_work(plan: DecoderPlan, stored: StoredBytes, requests: Sequence[RequestStep]) -> StepWork:
    """The work of a step that computes these requests' parts. stored: bytes of each tensor of the engine."""
    num_tokens = sum(len(request.token_ids) for request in requests)
    num_logits = sum(request.num_logits for request in requests)
    calls: list[OperatorCall] = []
    for layer_index in range(plan.config.num_layers):
        name = f"layers.{layer_index}"
        calls += _linear_calls(plan, stored, f"{name}.qkv", "qkv", num_tokens)
        calls.append(_cache_write(plan, num_tokens))
        calls.append(_attention(plan, layer_index, requests))
        calls += _linear_calls(plan, stored, f"{name}.output", "output", num_tokens)
        calls += _linear_calls(plan, stored, f"{name}.gate_up", "gate_up", num_tokens)
        calls.append(OperatorCall("gated_activation", "activation", "fp32", 0, 0))
        calls += _linear_calls(plan, stored, f"{name}.down", "down", num_tokens)
    calls += _linear_calls(plan, stored, "head", "head", num_logits)
    norms = sum(size for name, size in stored.items() if name.endswith("norm.weight"))
    row_bytes = stored["embedding"] // plan.config.vocab_size
    return StepWork(tuple(calls), norms + num_tokens * row_bytes)


def _linear_calls(
    plan: DecoderPlan, stored: StoredBytes, name: str, role: Role, num_rows: int
) -> list[OperatorCall]:
    return [
        OperatorCall(
            operator=_operator(spec),
            role=role,
            arithmetic="int8" if spec.activations == "int8" else "fp32",
            num_bytes=_linear_bytes(plan, stored, f"{name}.{index}") if num_rows else 0,
            num_operations=2 * num_rows * spec.in_features * spec.out_features,
        )
        for index, spec in enumerate(plan.linears[name])
    ]


def _operator(spec: LinearSpec) -> str:
    if spec.is_fp8:
        return "linear_fp8"
    return "linear_quantized" if spec.is_quantized else "linear_dense"


def _linear_bytes(plan: DecoderPlan, stored: StoredBytes, name: str) -> int:
    if name == "head.0" and plan.shares_embedding:
        return stored["embedding"]
    return sum(stored.get(f"{name}.{part}", 0) for part in ("weight", "scale", "zero_point", "bias"))


def _cell_bytes(plan: DecoderPlan) -> int:
    """Keys and values of one token in one layer."""
    return plan.kv_bytes_per_token // plan.config.num_layers


def _cache_write(plan: DecoderPlan, num_tokens: int) -> OperatorCall:
    return OperatorCall("write_kv_cache", "cache_write", "fp32", num_tokens * _cell_bytes(plan), 0)


def _attention(plan: DecoderPlan, layer_index: int, requests: Sequence[RequestStep]) -> OperatorCall:
    """Keys times queries and weights times values, two products each over what a query sees."""
    config = plan.config
    window = config.sliding_windows[layer_index]
    num_cells = num_pairs = 0
    for request in requests:
        spans = [_num_seen(request.start + row, window) for row in range(len(request.token_ids))]
        num_pairs += sum(spans)
        # From the first key of the first row to the last row's own.
        num_cells += spans[0] + len(spans) - 1 if spans else 0
    operations = 4 * config.num_heads * config.head_size * num_pairs
    return OperatorCall("paged_attention", "attention", "fp32", num_cells * _cell_bytes(plan), operations)


def _num_seen(position: int, window: int) -> int:
    """Keys that the query at this position sees, its own included. window 0: all."""
    return min(position + 1, window) if window else position + 1
