"""The forms with VNNI, built with their instructions emulated, and called by their tables without torch."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bitsmith.ops.isa import enabled_isa, missing_isa
from bitsmith.ops.library import SOURCES_DIR, find_compiler
from bitsmith.ops.packing import PackedLinear

_HERE = Path(__file__).parent
_SOURCES = (
    SOURCES_DIR / "form_avx512_vnni.cpp",
    SOURCES_DIR / "form_avx_vnni.cpp",
    _HERE / "harness.cpp",
)
_EMULATED_ON = "-march=x86-64-v3"  # the emulation covers what lies beyond these sets
_FLAGS = (
    _EMULATED_ON, "-O1", f"-I{_HERE}", f"-I{SOURCES_DIR}",
    "-DBITSMITH_HAS_AVX512_VNNI=1", "-DBITSMITH_HAS_AVX_VNNI=1",
)  # fmt: skip


@pytest.fixture(scope="session")
def emulated(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of harness.cpp."""
    compiler = find_compiler()
    if missing := missing_isa(enabled_isa(compiler, [_EMULATED_ON])):
        pytest.skip(f"the emulation needs {', '.join(missing)}")
    directory = tmp_path_factory.mktemp("emulated")
    objects = [str(directory / f"{source.stem}.o") for source in _SOURCES]
    running = [
        subprocess.Popen([compiler, *flags, *_FLAGS, "-c", str(source), "-o", to])
        for source, to in zip(_SOURCES, objects, strict=True)
    ]
    assert [process.wait() for process in running] == [0] * len(running)
    library = directory / "emulated.so"
    subprocess.run([compiler, "-shared", *flags, *objects, "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.fastest_form.restype = ctypes.c_char_p
    loaded.multiply_add.restype = ctypes.c_int64
    return loaded


@pytest.fixture(scope="session")
def linear_quantized(emulated: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """What the operator does with int8 activations, in a form by name."""

    def run(form: str, x: torch.Tensor, packed: PackedLinear, bias: torch.Tensor | None) -> torch.Tensor:
        assert x.is_contiguous() and x.dtype == torch.float32
        y = torch.empty(x.shape[0], packed.out_features)
        columns, group_size = packed.in_features, packed.group_size
        sizes = torch.tensor([x.shape[0], columns, packed.out_features, group_size, packed.num_bits])
        is_bf16 = ctypes.c_bool(packed.scale.dtype == torch.bfloat16)
        tensors = (x, packed.weight, packed.scale, packed.zero_point, bias, y)
        emulated.linear_quantized(form.encode(), _pointer(sizes), is_bf16, *map(_pointer, tensors))
        return y

    return run


@pytest.fixture(scope="session")
def linear_dense(emulated: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """What the operator does with fp32 activations, in a form by name."""

    def run(form: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert x.is_contiguous() and x.dtype == torch.float32
        y = torch.empty(x.shape[0], weight.shape[0])
        sizes = torch.tensor([x.shape[0], weight.shape[1], weight.shape[0]])
        is_bf16 = ctypes.c_bool(weight.dtype == torch.bfloat16)
        emulated.linear_dense(form.encode(), _pointer(sizes), is_bf16, *map(_pointer, (x, weight, bias, y)))
        return y

    return run


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
