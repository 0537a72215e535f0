"""The decoder that a TensorRT-LLM configuration describes: sizes, layers of a rank, and linears by name.

Knows names and shapes of the family's modules; knows nothing of quantization, files or tensors' values.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from bitsmith.compile.tensorrt_quantization import QuantConfig

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "QWenForCausalLM": "qwen2",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}
SINCE_1_0: tuple[Family, ...] = ("qwen3", "gemma3")
LINEAR_NAMES = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear as one rank holds it. is_column: split along out (else along in)."""

    name: str
    out_features: int
    in_features: int
    is_column: bool
    has_bias: bool


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Everything in config.json that decides which tensors a checkpoint has."""

    architecture: str
    family: Family
    dtype: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    tp_size: int = 1
    pp_size: int = 1
    attn_bias: bool = False
    mlp_bias: bool = False
    qk_layernorm: bool = False
    share_embedding_table: bool = False
    use_parallel_embedding: bool = False
    embedding_sharding_dim: int = 0
    quant: QuantConfig = field(default_factory=QuantConfig)

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def is_gemma(self) -> bool:
        return self.family in ("gemma2", "gemma3")

    @property
    def has_dense_bias(self) -> bool:
        """Qwen2 has a bias on q, k and v but none on the output projection."""
        return self.attn_bias and self.family not in ("qwen2", "qwen3")

    @property
    def num_rank_heads(self) -> int:
        return self.num_heads // self.tp_size

    @property
    def num_rank_kv_heads(self) -> int:
        """KV heads are repeated when there are fewer of them than ranks."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the head before it is split: the next multiple of the ranks."""
        return -(-self.vocab_size // self.tp_size) * self.tp_size

    @property
    def layers_per_rank(self) -> int:
        return self.num_layers // self.pp_size

    def pp_rank(self, rank: int) -> int:
        return rank // self.tp_size

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp_size

    def has_embedding(self, rank: int) -> bool:
        return self.pp_rank(rank) == 0

    def has_head(self, rank: int) -> bool:
        """The last pipeline rank holds ln_f and, unless the table is shared, lm_head."""
        return self.pp_rank(rank) == self.pp_size - 1

    def linears(self) -> Iterator[LinearShape]:
        """The five linears of every layer, as each rank holds them."""
        qkv = (self.num_rank_heads + 2 * self.num_rank_kv_heads) * self.head_size
        heads = self.num_rank_heads * self.head_size
        inner = self.intermediate_size // self.tp_size
        hidden = self.hidden_size
        yield LinearShape("attention.qkv", qkv, hidden, True, self.attn_bias)
        yield LinearShape("attention.dense", hidden, heads, False, self.has_dense_bias)
        yield LinearShape("mlp.fc", inner, hidden, True, self.mlp_bias)
        yield LinearShape("mlp.gate", inner, hidden, True, self.mlp_bias)
        yield LinearShape("mlp.proj", hidden, inner, False, self.mlp_bias)

    def norms(self) -> Iterator[tuple[str, int]]:
        """(name below the layer, size) of every norm of a layer."""
        yield "input_layernorm", self.hidden_size
        yield "post_layernorm", self.hidden_size
        if self.is_gemma:
            yield "pre_feedforward_layernorm", self.hidden_size
            yield "post_feedforward_layernorm", self.hidden_size
        if self.qk_layernorm:
            yield "attention.q_layernorm", self.head_size
            yield "attention.k_layernorm", self.head_size
