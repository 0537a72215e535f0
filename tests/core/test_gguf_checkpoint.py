"""GGUF files written here, as llama.cpp's converter writes them, and read back to the very same tensors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.errors import Refused
from bitsmith.core.gguf_checkpoint import convert_gguf, unpermuted
from bitsmith.core.model_ref import resolve_model
from bitsmith.core.progress import Reporter

VOCAB = 259
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

GGUFMaker = Callable[..., Path]


def permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter permutes q and k (`LlamaModel.permute`)."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def gguf_name(name: str, parts: Mapping[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{parts[part]}.{kind}"


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 3))
def test_unpermuted_undoes_permuted(num_heads: int, half: int, columns: int) -> None:
    values = np.arange(num_heads * 2 * half * columns).reshape(-1, columns)
    assert np.array_equal(unpermuted(permuted(values, num_heads), num_heads), values)


def test_neighbouring_rows_become_the_halves_of_a_head() -> None:
    rows = np.arange(8).reshape(8, 1)  # two heads of four rows
    assert unpermuted(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.fixture
def write_gguf(tmp_path: Path) -> GGUFMaker:
    def write(
        arch: str, model: PreTrainedModel, *, edit: Callable[..., Any] | None = None, **fields: Any
    ) -> Path:
        config, path = model.config, tmp_path / f"{arch}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<bos>", "<eos>", "th"])
        writer.add_token_types([1] * 256 + [3, 3, 1])
        writer.add_token_merges(["t h"])
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(257)
        for key, value in fields.items():
            getattr(writer, key)(value)
        is_gemma = arch.startswith("gemma")
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = tensor.float().numpy()
            target = gguf_name(name, GEMMA_PARTS if is_gemma else PARTS)
            if arch == "llama" and ("attn_q." in target or "attn_k." in target):
                num_heads = config.num_attention_heads if "attn_q." in target else config.num_key_value_heads
                values = permuted(values, num_heads)
            if is_gemma and target.endswith("norm.weight"):
                values = values + np.float32(1)
            kept = edit(target, values) if edit else values
            if kept is not None:
                writer.add_tensor(target, np.ascontiguousarray(kept))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def llama(**extra: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**COMMON | {"tie_word_embeddings": False} | extra))


def gemma() -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    extra = {"num_hidden_layers": 7, "sliding_window": 4, "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**COMMON | extra))
    for name, tensor in model.state_dict().items():
        if name.endswith("norm.weight"):  # zeros as made; any others show whether one was added or taken
            tensor.uniform_(-0.5, 0.5)
    return model


def converted(path: Path, directory: Path, reporter: Reporter) -> CheckpointReader:
    directory.mkdir()
    convert_gguf(path, directory, reporter)
    return CheckpointReader(directory)


@pytest.mark.parametrize("arch", ["llama", "llama-tied", "qwen3", "gemma3"])
def test_a_converted_model_is_the_model(
    arch: str, write_gguf: GGUFMaker, tmp_path: Path, reporter: Reporter
) -> None:
    """Every tensor to the bit, and the logits, so that the config is right too."""
    fields: dict[str, Any] = {"add_rope_freq_base": 10000.0}
    model: PreTrainedModel
    if arch == "gemma3":
        model = gemma()
        fields = {"add_rope_freq_base": 1_000_000.0, "add_sliding_window": 4}
    elif arch == "qwen3":
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON, tie_word_embeddings=True))
    else:
        model = llama(tie_word_embeddings=arch == "llama-tied")
    for parameter in model.parameters():  # not model.to(), which would round the rotary frequencies too
        parameter.data = parameter.data.to(torch.bfloat16).float()
    path = write_gguf(arch.removesuffix("-tied"), model, **fields)
    reader = converted(path, tmp_path / "out", reporter)

    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    assert sorted(reader.names) == sorted(expected)
    for name, tensor in expected.items():
        assert reader.dtype(name) == torch.bfloat16
        assert torch.equal(reader.tensor(name).float(), tensor), name

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    token_ids = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(again(token_ids).logits, model(token_ids).logits)


def test_quantized_tensors_are_dequantized(write_gguf: GGUFMaker, tmp_path: Path, reporter: Reporter) -> None:
    """Blocks of Q8_0 are 32 values: an fp16 scale, then int8."""
    model = llama()
    weight = model.state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()  # [64, 32]: a block per row
    blocks = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0).reshape(64, 34)
    path = with_tensor(
        write_gguf("llama", model), "blk.0.ffn_up.weight", blocks, kind=gguf.GGMLQuantizationType.Q8_0
    )
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    expected = torch.from_numpy(scales * blocks[:, 2:].view(np.int8)).to(torch.bfloat16)
    found = converted(path, tmp_path / "out", reporter).tensor("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(found, expected)


def test_llama3_rotary_scaling_is_recovered(
    write_gguf: GGUFMaker, tmp_path: Path, reporter: Reporter
) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes: dict[str, Any] = {
        "max_position_embeddings": 65536,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
    }
    scaled = LlamaForCausalLM(LlamaConfig(**COMMON | sizes))
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    divisors = (plain / scaled.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    path = write_gguf("llama", scaled, add_rope_freq_base=500000.0)
    found = converted(with_tensor(path, "rope_freqs.weight", divisors), tmp_path / "out", reporter)
    assert found.config["rope_scaling"] == scaling
    with pytest.raises(Refused, match="does not follow the llama3 rule"):
        converted(with_tensor(path, "rope_freqs.weight", np.sqrt(divisors)), tmp_path / "wrong", reporter)


def test_what_has_no_place_is_refused(write_gguf: GGUFMaker, tmp_path: Path, reporter: Reporter) -> None:
    def dropped(name: str, values: np.ndarray) -> np.ndarray | None:
        return None if name == "blk.1.ffn_up.weight" else values

    def reshaped(name: str, values: np.ndarray) -> np.ndarray:
        return values[:, :16] if name == "blk.1.attn_v.weight" else values

    with pytest.raises(Refused, match=r"model\.layers\.1\.mlp\.up_proj\.weight has shape None.*\(64, 32\)"):
        converted(write_gguf("llama", llama(), edit=dropped), tmp_path / "a", reporter)
    with pytest.raises(Refused, match=r"v_proj\.weight has shape \(32, 16\).*\(32, 32\)"):
        converted(write_gguf("llama", llama(), edit=reshaped), tmp_path / "b", reporter)
    extra = with_tensor(write_gguf("llama", llama()), "blk.0.ffn_gate_exps.weight", np.zeros(4, np.float32))
    with pytest.raises(Refused, match=r"'blk\.0\.ffn_gate_exps\.weight' has no place"):
        converted(extra, tmp_path / "c", reporter)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("add_rope_scaling_type", gguf.RopeScalingType.YARN, "rope.scaling.type is 'yarn'"),
        ("add_expert_count", 8, "no mixture of experts"),
        ("add_tokenizer_pre", "tekken", "tokenizer.ggml.pre is 'tekken'"),
        ("add_tokenizer_model", "t5", "tokenizer.ggml.model is 't5'"),
        ("add_value_length", 8, "attention.value_length differs"),
    ],
)
def test_what_is_not_understood_is_refused(
    field: str, value: Any, said: str, write_gguf: GGUFMaker, tmp_path: Path, reporter: Reporter
) -> None:
    with pytest.raises(Refused, match=said):
        converted(write_gguf("llama", llama(), **{field: value}), tmp_path / "out", reporter)


def test_other_architectures_and_other_files_are_refused(
    write_gguf: GGUFMaker, tmp_path: Path, reporter: Reporter
) -> None:
    with pytest.raises(Refused, match="'mamba' is not supported; supported are llama"):
        converted(write_gguf("mamba", llama()), tmp_path / "out", reporter)
    whole = write_gguf("llama", llama()).read_bytes()
    for index, data in enumerate(
        [b"", b"GGUF", b"not a GGUF file at all", whole[:300], whole[: len(whole) // 2]]
    ):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(data)
        with pytest.raises(Refused, match="not a readable GGUF file"):
            converted(path, tmp_path / f"out-{index}", reporter)


def test_a_gguf_path_is_converted_once_for_its_bytes(
    write_gguf: GGUFMaker, tmp_path: Path, reporter: Reporter, cache_home: Path
) -> None:
    path = write_gguf("llama", llama())
    first = resolve_model(str(path), reporter=reporter)
    assert first.name == "llama"
    assert first.path.is_relative_to(cache_home)
    inode = (first.path / "model.safetensors").stat().st_ino
    renamed = path.rename(tmp_path / "other.gguf")
    second = resolve_model(str(renamed), reporter=reporter)
    assert (second.name, second.path, second.origin) == ("other", first.path, first.origin)
    assert (second.path / "model.safetensors").stat().st_ino == inode
    # A conversion that lost a byte is made again.
    data = bytearray((first.path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (first.path / "model.safetensors").write_bytes(data)
    third = resolve_model(str(renamed), reporter=reporter)
    data[-1] ^= 1
    assert (third.path / "model.safetensors").read_bytes() == data
    assert sorted(p.name for p in first.path.parent.iterdir() if not p.name.startswith(".")) == [
        first.path.name
    ]


def with_tensor(
    path: Path, name: str, values: np.ndarray, *, kind: gguf.GGMLQuantizationType | None = None
) -> Path:
    """The file with one tensor added or replaced: all is copied, for GGUF has no appending."""
    reader = gguf.GGUFReader(path)
    target = path.with_name(f"{path.stem}-with.gguf")
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if tensor.name != name:
            writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
