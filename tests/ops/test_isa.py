"""Forms of the kernels and the instruction sets that they need: in compilers, libraries and refusals."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bitsmith.core.errors import Refused, WorkFailed
from bitsmith.ops import isa
from bitsmith.ops.library import COMPILE_FLAGS, SOURCES_DIR, check_isa, find_compiler

AVX512 = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
AVX_VNNI = ("-march=x86-64-v3", "-mavxvnni")
WITHOUT_VNNI = isa.FORM_ISA["avx2"] | {"sse4_2", "popcnt", "avx", "bmi1", "bmi2"}


def compiled_for(machine: tuple[str, ...]) -> tuple[str, ...]:
    """The library's flags for another processor. Skips where the compiler does not know it."""
    flags = (*COMPILE_FLAGS, *machine)
    try:
        isa.enabled_isa(find_compiler(), flags)
    except WorkFailed:
        pytest.skip(f"the compiler has not {' '.join(machine)}")
    return flags


@pytest.mark.parametrize(
    ("source", "machine", "instruction"),
    [
        ("form_avx512_vnni.cpp", AVX512, r"vpdpbusd\s.*%zmm"),
        ("form_avx_vnni.cpp", AVX_VNNI, r"vpdpbusd\s.*%ymm"),
        ("form_avx2.cpp", AVX512, r"vpmaddubsw"),
        ("form_portable.cpp", AVX512, r"vfmadd"),
    ],
)
def test_a_form_compiles_to_its_instructions(
    source: str, machine: tuple[str, ...], instruction: str, tmp_path: Path
) -> None:
    assembly = tmp_path / "form.s"
    flags = compiled_for(machine)
    command = [find_compiler(), *flags, "-O1", "-S", str(SOURCES_DIR / source), "-o", str(assembly)]
    subprocess.run(command, check=True)
    assert re.search(instruction, assembly.read_text())


@pytest.mark.parametrize(("form", "machine"), [("avx512_vnni", AVX512), ("avx_vnni", AVX_VNNI)])
def test_a_build_says_what_it_needs_and_is_refused_elsewhere(
    form: str, machine: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = isa.enabled_isa(find_compiler(), compiled_for(machine))
    assert isa.fastest_form(frozenset(needed)) == form
    monkeypatch.setattr(isa, "cpu_flags", lambda: WITHOUT_VNNI)
    assert isa.fastest_form(isa.cpu_flags()) == "avx2"
    with pytest.raises(Refused, match=rf"lacks .*{form}.* Compile the engine on this machine"):
        check_isa(needed)


def test_the_library_of_this_machine_takes_the_fastest_form(ops: Any) -> None:
    assert ops.active_form() == isa.fastest_form(frozenset(isa.enabled_isa(find_compiler(), COMPILE_FLAGS)))


def test_without_vector_instructions_the_portable_form_remains() -> None:
    assert isa.fastest_form(frozenset({"sse4_2", "avx2"})) == "portable"
