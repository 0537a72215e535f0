"""A tiny random Llama with a byte-level tokenizer and a chat template, and a recipe for it."""

from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)  # type: ignore[arg-type]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def recipe_path(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Everything is small; the gate is one that a random model passes."""
    recipe = {
        "version": 1,
        "model": str(tiny_model),
        "quantize": {
            "scheme": "w8a16-gptq",
            "group_size": 32,
            "kv_cache": "fp8",
            "calibration": {"num_samples": 4, "seq_len": 32},
        },
        "compile": {"max_batch_size": 4, "max_num_tokens": 128, "max_model_len": 512},
        "evaluate": {
            "num_windows": 4,
            "seq_len": 64,
            "num_cloze_items": 4,
            "gate": {"kl_mean": {"max": 1.0}},
        },
        "serve": {"speculate": "ngram", "port": 8123},
    }
    path = tmp_path_factory.mktemp("recipes") / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path
