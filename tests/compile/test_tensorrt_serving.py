"""Triton repositories and loading by the LLM API, run against doubles with TensorRT-LLM's signatures.

The doubles stand in for software that cannot be installed here; they prove that our side makes the calls
that docs/tensorrt-llm.md lists, and nothing about TensorRT-LLM itself.
"""

import re
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bitsmith.compile.tensorrt_job import TensorrtJob, plan_tensorrt
from bitsmith.compile.tensorrt_llm_api import load_llm, sampling_arguments
from bitsmith.compile.tensorrt_llm_args import RunLimits
from bitsmith.compile.tensorrt_output import compile_tensorrt
from bitsmith.core.errors import Refused
from bitsmith.core.manifest import read_manifest
from bitsmith.core.progress import Reporter
from bitsmith.core.sampling import SamplingParams

GOLDEN = Path(__file__).parent.parent / "golden" / "tensorrt"
FP8 = GOLDEN / "mo_hf_llama_fp8_kvfp8"
# Fields of TensorRT-LLM's SamplingParams, and nothing else.
_SAMPLING = (
    "end_id pad_id max_tokens bad bad_token_ids stop stop_token_ids include_stop_str_in_output "
    "embedding_bias n best_of use_beam_search top_k top_p top_p_min seed temperature min_tokens "
    "repetition_penalty presence_penalty frequency_penalty length_penalty min_p logprobs prompt_logprobs "
    "ignore_eos detokenize add_special_tokens truncate_prompt_tokens skip_special_tokens"
)
_LLM = (
    "model tokenizer backend tensor_parallel_size pipeline_parallel_size kv_cache_config max_batch_size "
    "max_num_tokens max_seq_len enable_chunked_prefill speculative_config disable_overlap_scheduler"
)
SAMPLING_FIELDS, LLM_FIELDS = frozenset(_SAMPLING.split()), frozenset(_LLM.split())


@dataclass
class Output:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class DoubleParams:
    fields: dict[str, Any]

    def __init__(self, **fields: Any) -> None:
        assert set(fields) <= SAMPLING_FIELDS, set(fields) - SAMPLING_FIELDS
        self.fields = fields


class DoubleResult:
    """Counts up from the prompt's length; one step for each token when streaming."""

    def __init__(self, inputs: Sequence[int] | str, params: DoubleParams, streaming: bool) -> None:
        self.outputs: list[Output] = []
        self._size, self._params, self._streaming = len(inputs), params, streaming

    def _output(self, count: int) -> Output:
        tokens = [self._size + index for index in range(count)]
        is_last = count == self._params.fields["max_tokens"]
        text = "".join(f"<{token}>" for token in tokens)
        return Output(0, text, tokens, "length" if is_last else None)

    def result(self) -> "DoubleResult":
        self.outputs = [self._output(self._params.fields["max_tokens"])]
        return self

    def __iter__(self) -> Iterator["DoubleResult"]:
        for count in range(1, self._params.fields["max_tokens"] + 1):
            self.outputs = [self._output(count)]
            yield self


class DoubleLlm:
    """A double of tensorrt_llm.LLM: unknown arguments are errors, as in the original."""

    made: "list[DoubleLlm]" = []  # noqa: RUF012 - the test looks here for what was made

    def __init__(self, **arguments: Any) -> None:
        assert set(arguments) <= LLM_FIELDS, set(arguments) - LLM_FIELDS
        self.arguments, self.is_open = arguments, True
        DoubleLlm.made.append(self)

    def generate_async(
        self, inputs: Sequence[int] | str, sampling_params: Any = None, *, streaming: bool = False
    ) -> DoubleResult:
        return DoubleResult(inputs, sampling_params, streaming)

    def shutdown(self) -> None:
        self.is_open = False


@pytest.fixture
def tensorrt_double(monkeypatch: pytest.MonkeyPatch) -> None:
    package, engine = types.ModuleType("tensorrt_llm"), types.ModuleType("tensorrt_llm._tensorrt_engine")
    package.__dict__.update(LLM=DoubleLlm, SamplingParams=DoubleParams)
    engine.__dict__.update(LLM=DoubleLlm)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm._tensorrt_engine", engine)
    DoubleLlm.made.clear()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make(tmp_path: Path, target: str, **options: Any) -> Path:
    job = TensorrtJob(
        FP8,
        tmp_path / "artifact",
        target,  # type: ignore[arg-type]
        limits=RunLimits(max_batch_size=4),
        triton=tmp_path / "triton",
        **options,
    )
    compile_tensorrt(job, plan_tensorrt(job), Reporter(quiet=True))
    return tmp_path / "triton"


def test_greedy_stays_greedy() -> None:
    greedy = sampling_arguments(SamplingParams(temperature=0.0, top_p=0.5, top_k=40), 5, 3, {2, 7})
    assert (greedy["top_k"], greedy["max_tokens"]) == (1, 5)
    assert not {"top_p", "seed"} & set(greedy)
    assert (greedy["end_id"], greedy["stop_token_ids"]) == (2, [7])
    sampled = sampling_arguments(SamplingParams(temperature=0.7, top_p=0.5, ignore_eos=True), 5, -1, {2, 7})
    assert (sampled["top_p"], sampled["seed"]) == (0.5, (1 << 63) - 1)
    assert not {"end_id", "stop_token_ids"} & set(sampled)
    assert set(greedy) | set(sampled) <= SAMPLING_FIELDS


def test_load_makes_the_llm_of_the_target(tensorrt_double: None, tmp_path: Path) -> None:
    make(tmp_path, "tensorrt-llm-pytorch")
    load_llm(tmp_path / "artifact", read_manifest(tmp_path / "artifact"))
    assert DoubleLlm.made[-1].arguments["model"] == str(tmp_path / "artifact" / "model")
    assert DoubleLlm.made[-1].arguments["max_batch_size"] == 4


def no_placeholders(repository: Path) -> None:
    files = [path for path in repository.rglob("*") if path.is_file()]
    assert files
    for path in files:
        text = path.read_text()
        if path.suffix != ".sh":
            assert "${" not in text, path
        if path.suffix == ".pbtxt":
            assert text.count("{") == text.count("}"), path
            assert text.count("[") == text.count("]"), path
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    subprocess.run(["bash", "-n", str(repository / "smoke_test.sh")], check=True)


def test_engine_repository(tmp_path: Path) -> None:
    repository = make(tmp_path, "tensorrt-llm", has_chunked_prefill=True)
    no_placeholders(repository)
    models = {path.parent.name for path in repository.glob("*/config.pbtxt")}
    assert models == {"ensemble", "preprocessing", "postprocessing", "tensorrt_llm"}
    assert all((repository / model / "1").is_dir() for model in models)
    text = (repository / "tensorrt_llm" / "config.pbtxt").read_text()
    values = dict(re.findall(r'key: "(\w+)"\n  value: \{ string_value: "([^"]*)" \}', text))
    assert values == {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": str(tmp_path / "artifact" / "engine"),
        "kv_cache_free_gpu_mem_fraction": "0.9",
        "enable_kv_cache_reuse": "true",
        "enable_chunked_context": "true",
        "batch_scheduler_policy": "guaranteed_no_evict",
        "exclude_input_in_output": "true",
    }
    assert "max_batch_size: 4" in text
    ensemble = (repository / "ensemble" / "config.pbtxt").read_text()
    declared = set(re.findall(r'name: "(\w+)"\n    data_type', ensemble))
    mapped = set(re.findall(r'value: "([a-z]\w*)"', ensemble))
    assert mapped == declared  # every port is used, and none that does not exist


class Tensor:
    def __init__(self, name: str, value: np.ndarray[Any, Any]) -> None:
        self._name, self._value = name, value

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._value

    @property
    def pair(self) -> tuple[str, Any]:
        return self._name, self._value.flatten()[0]


class Response:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: Any = None) -> None:
        self.values, self.error = dict(tensor.pair for tensor in output_tensors), error


class Sender:
    def __init__(self) -> None:
        self.sent: list[Response | None] = []

    def send(self, response: Response | None = None, flags: int = 0) -> None:
        self.sent.append(response)


class Request:
    def __init__(self, **values: Any) -> None:
        self.sender = Sender()
        self.tensors = {
            name: Tensor(name, np.array([value], dtype=object if isinstance(value, bytes) else None))
            for name, value in values.items()
        }

    def get_response_sender(self) -> Sender:
        return self.sender


def load_model(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The repository's own model.py, with a double of Triton's utilities."""
    utils = types.ModuleType("triton_python_backend_utils")
    utils.__dict__.update(
        Tensor=Tensor,
        InferenceResponse=Response,
        TritonError=str,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        get_input_tensor_by_name=lambda request, name: request.tensors.get(name),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    path = repository / "tensorrt_llm" / "1" / "model.py"
    space: dict[str, Any] = {"__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), space)
    model = space["TritonPythonModel"]()
    model.initialize({})
    return model


def test_llm_repository_answers(
    tensorrt_double: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = make(tmp_path, "tensorrt-llm-pytorch")
    no_placeholders(repository)
    config = (repository / "tensorrt_llm" / "config.pbtxt").read_text()
    assert "max_batch_size" not in config
    assert "transaction" not in config
    body = yaml.safe_load((repository / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert body["triton_config"] == {"max_batch_size": 0, "decoupled": False}
    assert body["model"] == str(tmp_path / "artifact" / "model")
    model = load_model(repository, monkeypatch)
    good = Request(text_input=b"four", sampling_param_max_tokens=np.int32(2))
    streaming = Request(text_input=b"x", sampling_param_max_tokens=np.int32(2), streaming=np.bool_(True))
    answers = model.execute([good, streaming])
    assert answers[0].values == {"text_output": "<4><5>", "finish_reason": "length"}
    assert "decoupled" in answers[1].error  # one bad request does not take the others down
    plain = Request(text_input=b"xy", sampling_param_max_tokens=np.int32(1))
    two = Request(text_input=b"x", sampling_param_max_tokens=np.int32(1))
    two.tensors["text_input"] = Tensor("text_input", np.array([b"a", b"b"], dtype=object))
    answers = model.execute([plain, two])
    assert answers[0].values["text_output"] == "<2>"
    assert "one text for each request" in answers[1].error
    model.finalize()
    assert not DoubleLlm.made[-1].is_open


def test_llm_repository_streams(
    tensorrt_double: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = make(tmp_path, "tensorrt-llm-pytorch", is_streaming=True)
    model = load_model(repository, monkeypatch)
    request = Request(text_input=b"x", sampling_param_max_tokens=np.int32(2), streaming=np.bool_(True))
    assert model.execute([request]) is None
    sent = request.sender.sent
    assert [response.values["text_output"] for response in sent if response is not None] == ["<1>", "<2>"]
    assert sent[-1] is None  # the final flag alone
    whole = Request(text_input=b"x", sampling_param_max_tokens=np.int32(2))
    model.execute([whole])
    assert whole.sender.sent[0] is not None
    assert whole.sender.sent[0].values["text_output"] == "<1><2>"
    assert len(whole.sender.sent) == 2


def test_another_directory_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "mine.txt").write_text("keep")
    with pytest.raises(Refused, match="no model repository of this program"):
        make(tmp_path, "tensorrt-llm")
    assert (tmp_path / "triton" / "mine.txt").read_text() == "keep"
