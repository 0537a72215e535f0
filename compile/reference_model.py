"""The reference: Hugging Face transformers in fp32 on the dequantized weights of any checkpoint."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from bitsmith.core.errors import Refused
from bitsmith.core.protocols import GeneratedText, ScoringRequest
from bitsmith.core.sampling import SamplingParams
from bitsmith.quantize.weight_source import WeightSource, open_weights

# Keys of config.json that would make transformers run other code or other formats than plain fp32.
_LEFT_OUT = ("quantization_config", "auto_map", "dtype", "torch_dtype")


def load_reference(source: WeightSource) -> PreTrainedModel:
    """The architecture in transformers, filled one weight at a time. No remote code, no quantized kernels."""
    config = AutoConfig.for_model(**{k: v for k, v in source.config.items() if k not in _LEFT_OUT})
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        model.tie_weights()  # a tied head has no weight of its own to be filled with
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in source:
                raise Refused(f"{source.path} has no weight {name!r} for the transformers reference.")
            parameter.copy_(source.dequantized(name))
    model.train(False)
    return model


class TransformersLogitsModel:
    """LogitsModel over transformers: one request at a time, so that no padding enters."""

    def __init__(self, path: Path) -> None:
        source = open_weights(path)
        self.notes = source.notes
        self.model = load_reference(source)

    @property
    def name(self) -> str:
        return "transformers fp32"

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def max_model_len(self) -> int:
        return int(self.model.config.max_position_embeddings)

    def score(self, requests: Sequence[ScoringRequest]) -> Iterator[Tensor]:
        for request in requests:
            yield reference_logits(self.model, request.token_ids, request.num_scored)


def reference_logits(model: PreTrainedModel, token_ids: Sequence[int], num_scored: int) -> Tensor:
    """Logits after the last `num_scored` positions: [num_scored, vocab_size] fp32."""
    with torch.inference_mode():
        output = model(torch.tensor([list(token_ids)]), logits_to_keep=num_scored, use_cache=False)
    logits: Tensor = output.logits[0]
    return logits


class TransformersGenerator:
    """TextGenerator over the same model: greedy, one prompt at a time."""

    def __init__(self, reference: TransformersLogitsModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = reference.model
        self._tokenizer = tokenizer

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Iterator[GeneratedText]:
        for prompt, param in zip(prompts, params, strict=True):
            yield self._generate_one(prompt, param)

    def _generate_one(self, prompt: Sequence[int], params: SamplingParams) -> GeneratedText:
        _refuse_unsupported(params)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=params.max_tokens,
            do_sample=False,
            eos_token_id=self._stop_token_ids(params) or None,
            pad_token_id=0,
        )
        inputs = torch.tensor([list(prompt)])
        generate: Any = self._model.generate
        with torch.inference_mode():
            output = generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=config,
                stop_strings=list(params.stop) or None,
                tokenizer=self._tokenizer if params.stop else None,
            )
        token_ids = tuple(output[0, len(prompt) :].tolist())
        return self._finish(token_ids, params)

    def _stop_token_ids(self, params: SamplingParams) -> list[int]:
        eos = [] if params.ignore_eos else self._model.generation_config.eos_token_id
        eos_ids = [eos] if isinstance(eos, int) else list(eos or ())
        return sorted({*eos_ids, *params.stop_token_ids})

    def _finish(self, token_ids: tuple[int, ...], params: SamplingParams) -> GeneratedText:
        text = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
        cuts = [position for stop in params.stop if (position := text.find(stop)) >= 0]
        if cuts:
            return GeneratedText(text[: min(cuts)], token_ids, "stop")
        is_stopped = bool(token_ids) and token_ids[-1] in self._stop_token_ids(params)
        return GeneratedText(text, token_ids, "stop" if is_stopped else "length")


def _refuse_unsupported(params: SamplingParams) -> None:
    default = SamplingParams()
    for name in ("temperature", "presence_penalty", "frequency_penalty", "logit_bias", "num_logprobs"):
        if getattr(params, name) != getattr(default, name):
            raise Refused(f"The transformers reference decodes greedily; {name} cannot be set for it.")
