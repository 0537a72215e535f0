"""Instruction sets: what a compiler's flags allow it to emit, and what this processor has."""

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from bitsmith.core.errors import WorkFailed

# Compiler macro -> flag in /proc/cpuinfo, for the sets that generated code uses beyond x86-64's first.
_FLAG_OF_MACRO = {
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__POPCNT__": "popcnt",
    "__MOVBE__": "movbe",
    "__LZCNT__": "abm",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__AVX__": "avx",
    "__F16C__": "f16c",
    "__FMA__": "fma",
    "__AVX2__": "avx2",
    "__AVXVNNI__": "avx_vnni",
    "__GFNI__": "gfni",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512CD__": "avx512cd",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512IFMA__": "avx512ifma",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AMX_TILE__": "amx_tile",
    "__AMX_INT8__": "amx_int8",
    "__AMX_BF16__": "amx_bf16",
}

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})

# Forms of the operators' kernels, fastest first, and the processor flags that each takes.
FORM_ISA = {
    "avx512_vnni": _AVX2 | _AVX512 | {"avx512_vnni"},
    "avx_vnni": _AVX2 | {"avx_vnni"},
    "avx2": _AVX2,
    "portable": frozenset[str](),
}


def fastest_form(flags: frozenset[str]) -> str:
    """The form of the kernels that a build for a processor with these flags takes."""
    return next(form for form, needed in FORM_ISA.items() if needed <= flags)


def enabled_isa(compiler: str, flags: Sequence[str]) -> tuple[str, ...]:
    """Processor flags of the instruction sets that these compiler flags switch on, sorted."""
    command = [compiler, *flags, "-dM", "-E", "-x", "c++", "/dev/null"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise WorkFailed(f"{compiler} does not take the flags {' '.join(flags)}:\n{result.stderr[-2000:]}")
    macros = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("#define ")}
    return tuple(sorted(flag for macro, flag in _FLAG_OF_MACRO.items() if macro in macros))


def cpu_flags() -> frozenset[str]:
    """Flags of this machine's processor, from /proc/cpuinfo; empty where that does not exist."""
    return frozenset(_cpuinfo("flags", "Features").split())


def cpu_model() -> str:
    """The processor's name, from /proc/cpuinfo; "unknown" where that does not say."""
    return _cpuinfo("model name") or "unknown"


def _cpuinfo(*names: str) -> str:
    """What the first processor's line of one of these names says; empty if there is none."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(names):
            return line.split(":", 1)[1].strip()
    return ""


def missing_isa(required: Iterable[str]) -> tuple[str, ...]:
    """Those of the required flags that this processor lacks, sorted."""
    return tuple(sorted(set(required) - cpu_flags()))
