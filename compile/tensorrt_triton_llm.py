"""The LLM-API Python backend for Triton: its configuration and its model, as texts.

The model is this project's own, with the ports that TensorRT-LLM's backend has; it runs inside Triton and
imports TensorRT-LLM there. `max_batch_size` and the transaction policy come from model.yaml.
"""

from bitsmith.compile.tensorrt_pbtxt import TensorPort, ports

_INPUTS = (
    TensorPort("text_input", "TYPE_STRING"),
    TensorPort("streaming", "TYPE_BOOL", (1,), is_optional=True),
    TensorPort("sampling_param_max_tokens", "TYPE_INT32", (1,), is_optional=True),
    TensorPort("sampling_param_temperature", "TYPE_FP32", (1,), is_optional=True),
    TensorPort("sampling_param_top_k", "TYPE_INT32", (1,), is_optional=True),
    TensorPort("sampling_param_top_p", "TYPE_FP32", (1,), is_optional=True),
    TensorPort("sampling_param_frequency_penalty", "TYPE_FP32", (1,), is_optional=True),
    TensorPort("sampling_param_presence_penalty", "TYPE_FP32", (1,), is_optional=True),
    TensorPort("sampling_param_seed", "TYPE_UINT64", (1,), is_optional=True),
    TensorPort("sampling_param_stop", "TYPE_STRING", (-1,), is_optional=True),
    TensorPort("return_finish_reason", "TYPE_BOOL", (1,), is_optional=True),
)
_OUTPUTS = (TensorPort("text_output", "TYPE_STRING"), TensorPort("finish_reason", "TYPE_STRING"))

LLM_CONFIG = (
    'name: "tensorrt_llm"\nbackend: "python"\n'
    + ports("input", _INPUTS)
    + ports("output", _OUTPUTS)
    + "instance_group [ { count: 1, kind: KIND_CPU } ]\n"
)

LLM_MODEL = '''\
"""Triton Python backend over TensorRT-LLM's LLM API. model.yaml beside it holds the arguments."""

import os

import numpy as np
import triton_python_backend_utils as pb_utils
import yaml

_SCALARS = (
    "max_tokens", "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "seed",
)


def _arguments():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "model.yaml")
    with open(path, encoding="utf-8") as file:
        return yaml.safe_load(file)


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        triton = _arguments()["triton_config"]
        config.set_max_batch_size(triton["max_batch_size"])
        config.set_model_transaction_policy({"decoupled": triton["decoupled"]})
        return config

    def initialize(self, args):
        from tensorrt_llm import LLM

        arguments = _arguments()
        self._is_streaming = arguments.pop("triton_config")["decoupled"]
        self._llm = LLM(**arguments)

    def execute(self, requests):
        pending = [(request, self._start(request)) for request in requests]
        if self._is_streaming:
            for request, (result, wants_stream) in pending:
                self._send(request.get_response_sender(), result, wants_stream)
            return None
        return [self._response(result) for _, (result, _) in pending]

    def finalize(self):
        self._llm.shutdown()

    def _start(self, request):
        """(running generation or the error that refused it, whether to stream it)."""
        from tensorrt_llm import SamplingParams

        try:
            values = {name: _scalar(request, "sampling_param_" + name) for name in _SCALARS}
            values = {name: value for name, value in values.items() if value is not None}
            stop = pb_utils.get_input_tensor_by_name(request, "sampling_param_stop")
            if stop is not None:
                values["stop"] = [word.decode() for word in stop.as_numpy().flatten()]
            prompts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().flatten()
            if len(prompts) != 1:
                raise ValueError(f"one text for each request, not {len(prompts)}")
            wants_stream = bool(_scalar(request, "streaming"))
            if wants_stream and not self._is_streaming:
                raise ValueError("streaming needs decoupled: true in model.yaml")
            params = SamplingParams(**values)
            running = self._llm.generate_async(prompts[0].decode(), params, streaming=wants_stream)
            return running, wants_stream
        except Exception as error:
            return error, False

    def _response(self, result):
        try:
            if isinstance(result, Exception):
                raise result
            return _answer(result.result().outputs[0])
        except Exception as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))

    def _send(self, sender, result, wants_stream):
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if not wants_stream:
            sender.send(self._response(result))
            sender.send(flags=final)
            return
        try:
            sent = 0
            for step in result:
                output = step.outputs[0]
                sender.send(_answer(output, output.text[sent:]))
                sent = len(output.text)
            sender.send(flags=final)
        except Exception as error:
            failure = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
            sender.send(failure, flags=final)


def _scalar(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().flatten()[0].item()


def _answer(output, text=None):
    values = {"text_output": output.text if text is None else text}
    values["finish_reason"] = output.finish_reason or ""
    tensors = [pb_utils.Tensor(name, np.array([value], dtype=object)) for name, value in values.items()]
    return pb_utils.InferenceResponse(output_tensors=tensors)
'''
