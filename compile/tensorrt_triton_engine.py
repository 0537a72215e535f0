"""The C++ backend's ensemble for Triton (containers with TensorRT-LLM 1.2 and older), as texts.

preprocessing -> tensorrt_llm -> postprocessing. The Python models are this project's own; the parameters of
`tensorrt_llm` are those of docs/tensorrt-llm.md.
"""

from collections.abc import Mapping

from bitsmith.compile.tensorrt_pbtxt import TensorPort, ensemble_step, parameters, ports, quoted

_CPU = "instance_group [ { count: 1, kind: KIND_CPU } ]\n"
_ENGINE_INPUTS = (
    TensorPort("input_ids", "TYPE_INT32"),
    TensorPort("input_lengths", "TYPE_INT32", (1,), is_scalar=True),
    TensorPort("request_output_len", "TYPE_INT32", (1,)),
    TensorPort("end_id", "TYPE_INT32", (1,), is_optional=True, is_scalar=True),
    TensorPort("pad_id", "TYPE_INT32", (1,), is_optional=True, is_scalar=True),
    TensorPort("temperature", "TYPE_FP32", (1,), is_optional=True, is_scalar=True),
    TensorPort("runtime_top_k", "TYPE_INT32", (1,), is_optional=True, is_scalar=True),
    TensorPort("runtime_top_p", "TYPE_FP32", (1,), is_optional=True, is_scalar=True),
    TensorPort("streaming", "TYPE_BOOL", (1,), is_optional=True),
)
_ENGINE_OUTPUTS = (
    TensorPort("output_ids", "TYPE_INT32", (-1, -1)),
    TensorPort("sequence_length", "TYPE_INT32", (-1,)),
)
_ASKED = (
    TensorPort("text_input", "TYPE_STRING", (1,)),
    TensorPort("max_tokens", "TYPE_INT32", (1,)),
    TensorPort("temperature", "TYPE_FP32", (1,), is_optional=True),
    TensorPort("top_k", "TYPE_INT32", (1,), is_optional=True),
    TensorPort("top_p", "TYPE_FP32", (1,), is_optional=True),
    TensorPort("streaming", "TYPE_BOOL", (1,), is_optional=True),
)
_TEXT = (TensorPort("text_output", "TYPE_STRING", (-1,)),)


def engine_repository(
    engine: str, tokenizer: str, max_batch_size: int, is_streaming: bool, options: Mapping[str, str]
) -> dict[str, str]:
    """Relative path -> text. engine, tokenizer: directories as the server sees them."""
    tokenizer_parameter = parameters({"tokenizer_dir": tokenizer})
    batch = f"max_batch_size: {max_batch_size}\n"
    prepared = (
        TensorPort("input_ids", "TYPE_INT32"),
        TensorPort("input_lengths", "TYPE_INT32", (1,)),
        TensorPort("end_id", "TYPE_INT32", (1,)),
        TensorPort("pad_id", "TYPE_INT32", (1,)),
    )
    python = 'backend: "python"\n' + batch
    return {
        "preprocessing/config.pbtxt": 'name: "preprocessing"\n'
        + python
        + ports("input", _ASKED[:1])
        + ports("output", prepared)
        + tokenizer_parameter
        + _CPU,
        "preprocessing/1/model.py": _PREPROCESSING,
        "postprocessing/config.pbtxt": 'name: "postprocessing"\n'
        + python
        + ports("input", _ENGINE_OUTPUTS)
        + ports("output", _TEXT)
        + tokenizer_parameter
        + _CPU,
        "postprocessing/1/model.py": _POSTPROCESSING,
        "tensorrt_llm/config.pbtxt": _engine_config(engine, batch, is_streaming, options),
        "tensorrt_llm/1/.keep": "",  # Triton wants a version directory, even an empty one
        "ensemble/config.pbtxt": _ensemble_config(batch),
        "ensemble/1/.keep": "",
    }


def _engine_config(engine: str, batch: str, is_streaming: bool, options: Mapping[str, str]) -> str:
    values = {"gpt_model_type": "inflight_fused_batching", "gpt_model_path": engine, **options}
    decoupled = str(is_streaming).lower()
    return (
        'name: "tensorrt_llm"\nbackend: "tensorrtllm"\n'
        + batch
        + f"model_transaction_policy {{ decoupled: {decoupled} }}\n"
        + "dynamic_batching { max_queue_delay_microseconds: 0 }\n"
        + ports("input", _ENGINE_INPUTS)
        + ports("output", _ENGINE_OUTPUTS)
        + "instance_group [ { count: 1, kind: KIND_CPU } ]\n"
        + parameters(values)
    )


def _ensemble_config(batch: str) -> str:
    to_engine = {name: f"_{name.upper()}" for name in ("input_ids", "input_lengths", "end_id", "pad_id")}
    asked = {"request_output_len": "max_tokens", "temperature": "temperature", "streaming": "streaming"}
    asked |= {"runtime_top_k": "top_k", "runtime_top_p": "top_p"}
    made = {"output_ids": "_OUTPUT_IDS", "sequence_length": "_SEQUENCE_LENGTH"}
    steps = (
        ensemble_step("preprocessing", {"text_input": "text_input"}, to_engine),
        ensemble_step("tensorrt_llm", to_engine | asked, made),
        ensemble_step("postprocessing", made, {"text_output": "text_output"}),
    )
    return (
        f"name: {quoted('ensemble')}\nplatform: {quoted('ensemble')}\n"
        + batch
        + ports("input", _ASKED)
        + ports("output", _TEXT)
        + "ensemble_scheduling {\n  step [\n"
        + ",\n".join(steps)
        + "\n  ]\n}\n"
    )


_PREPROCESSING = '''\
"""Text to token ids, in front of the engine."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._tokenizer = AutoTokenizer.from_pretrained(parameters["tokenizer_dir"]["string_value"])

    def execute(self, requests):
        return [self._prepare(request) for request in requests]

    def _prepare(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().flatten()
        if len(texts) != 1:
            error = pb_utils.TritonError(f"one text for each request, not {len(texts)}")
            return pb_utils.InferenceResponse(error=error)
        token_ids = self._tokenizer.encode(texts[0].decode())
        end_id = self._tokenizer.eos_token_id
        pad_id = self._tokenizer.pad_token_id
        values = {
            "input_ids": [token_ids],
            "input_lengths": [[len(token_ids)]],
            "end_id": [[end_id]],
            "pad_id": [[end_id if pad_id is None else pad_id]],
        }
        tensors = [pb_utils.Tensor(name, np.array(value, dtype=np.int32)) for name, value in values.items()]
        return pb_utils.InferenceResponse(output_tensors=tensors)
'''

_POSTPROCESSING = '''\
"""Token ids to text, behind the engine."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._tokenizer = AutoTokenizer.from_pretrained(parameters["tokenizer_dir"]["string_value"])

    def execute(self, requests):
        return [self._finish(request) for request in requests]

    def _finish(self, request):
        beams = pb_utils.get_input_tensor_by_name(request, "output_ids").as_numpy()[0]
        lengths = pb_utils.get_input_tensor_by_name(request, "sequence_length").as_numpy()[0]
        texts = [
            self._tokenizer.decode(beam[:length], skip_special_tokens=True).encode()
            for beam, length in zip(beams, lengths)
        ]
        tensor = pb_utils.Tensor("text_output", np.array([texts], dtype=object))
        return pb_utils.InferenceResponse(output_tensors=[tensor])
'''
