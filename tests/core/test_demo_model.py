"""The real demo model: fetched, converted, and proved against transformers' own reader of the same file."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from bitsmith.core.checkpoint import CheckpointReader
from bitsmith.core.demo_models import DEMO_MODELS, fetch_gguf
from bitsmith.core.model_ref import ModelSource, resolve_model, source_digest
from bitsmith.core.progress import Reporter
from bitsmith.core.text_source import load_text, pack_windows
from bitsmith.core.tokenizer import load_tokenizer, render_chat

pytestmark = pytest.mark.demo

NAME = "smollm2-135m"
USER_CACHE = os.environ.get("XDG_CACHE_HOME", "")  # before the fixture of every other test moves it


@pytest.fixture(autouse=True)
def user_cache(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own cache, so that the model is fetched once for all runs of the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", USER_CACHE)


@pytest.fixture
def model(user_cache: None) -> ModelSource:
    return resolve_model(NAME, reporter=Reporter(quiet=True))


@pytest.fixture
def tokenizer(model: ModelSource) -> PreTrainedTokenizerBase:
    return load_tokenizer(model.path)


def perplexity(model: PreTrainedModel, windows: torch.Tensor) -> float:
    with torch.no_grad():
        losses = [float(model(window[None], labels=window[None]).loss) for window in windows]
    return float(torch.tensor(losses).mean().exp())


def test_the_conversion_agrees_with_another_reader_of_the_file(
    model: ModelSource, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    ours = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    text = load_text("builtin", "evaluation")
    windows = pack_windows(text, tokenizer, num_windows=2, seq_len=256, seed=0).token_ids
    found = perplexity(ours, windows)

    path = fetch_gguf(DEMO_MODELS[NAME], tmp_path, Reporter(quiet=True))
    theirs = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        str(path), return_tensors=True, model_to_load=ours
    )
    reader, tensors = CheckpointReader(model.path), theirs["tensors"]
    assert sorted(reader.names) == sorted(set(tensors) - {"lm_head.weight"})
    for name in reader.names:
        assert torch.equal(reader.tensor(name), tensors[name].to(torch.bfloat16)), name
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "vocab_size"):
        assert reader.config[name] == theirs["config"][name]
    assert reader.config["rms_norm_eps"] == pytest.approx(theirs["config"]["rms_norm_eps"], rel=1e-7)

    # Rounding to bf16 is all that differs: to a tenth of a percent of the perplexity of a known text.
    ours.load_state_dict(tensors, strict=False)
    expected = perplexity(ours, windows)
    assert found == pytest.approx(expected, rel=1e-3)
    assert found != expected
    assert 2 < expected < 60


def test_the_tokenizer_is_the_models_own(tokenizer: PreTrainedTokenizerBase) -> None:
    """Ids as the published SmolLM2 tokenizer gives them: digits one by one, spaces before them together."""
    assert len(tokenizer) == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("Hello  12345 world").input_ids)
    assert pieces == ["Hello", "ĠĠ", "1", "2", "3", "4", "5", "Ġworld"]
    for text in ("  1 2  3\n\n\tdéjà vu 東京 🙂 it's", load_text("builtin", "calibration").documents[0]):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_start|>user\nhi<|im_end|>").input_ids == [1, 4093, 198, 6004, 2]


def test_a_chat_is_rendered_with_one_bos(tokenizer: PreTrainedTokenizerBase) -> None:
    token_ids = render_chat(tokenizer, [{"role": "user", "content": "hi"}])
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(token_ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_directory_is_the_same_on_every_machine(model: ModelSource) -> None:
    """To the byte, for the pinned releases of tokenizers and safetensors; new pins may want a new digest."""
    assert source_digest(model.path) == "a5fd626a0fcc30e01fada9985a989d004ed276343358c035cabca7c689c89e7e"
    assert CheckpointReader(model.path).config["rope_theta"] == 100000.0
