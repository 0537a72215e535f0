"""The loops do the work that they say, on any number of threads; what they measured is kept and found."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bitsmith.ops import ceilings as ceilings_module
from bitsmith.ops.ceilings import Ceilings, machine_ceilings

MEASURED = Ceilings("a processor", "avx2", 2, 2e10, 1e11, 4e11, "2026-01-01T00:00:00+00:00")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Ceilings]:
    """Measuring is replaced; every measurement made is in the list."""
    made: list[Ceilings] = []

    def measure() -> Ceilings:
        made.append(dataclasses.replace(MEASURED, read_bytes_per_s=1e9 * (len(made) + 1)))
        return made[-1]

    monkeypatch.setattr(ceilings_module, "measure_ceilings", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_units", [0, 1, 7, 300])
def test_every_byte_is_read_once(ops: Any, num_threads: int, num_units: int) -> None:
    ops.set_num_threads(num_threads)
    words = torch.randint(-(1 << 40), 1 << 40, (num_units * 128,))
    assert ops.ceiling_read(words.view(torch.uint8)) == int(words.sum())


def test_what_cannot_be_read_in_whole_units_is_refused(ops: Any) -> None:
    for data in (torch.zeros(1000, dtype=torch.uint8), torch.zeros(1024), torch.zeros(2, 1024).byte()):
        with pytest.raises(ValueError, match="multiple of 1024"):
            ops.ceiling_read(data)


@pytest.mark.parametrize("is_int8", [False, True])
def test_operations_grow_with_steps_and_threads(form: Any, is_int8: bool) -> None:
    one_step = form.ceiling_arithmetic(1, is_int8)
    assert one_step > 0
    assert form.ceiling_arithmetic(30, is_int8) == 30 * one_step
    form.set_num_threads(2)
    assert form.ceiling_arithmetic(30, is_int8) == 60 * one_step
    with pytest.raises(ValueError, match="num_steps is -1"):
        form.ceiling_arithmetic(-1, is_int8)


def test_a_measurement_says_what_it_holds_for(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_module, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings_module, "_NUM_STEPS", 100)
    monkeypatch.setattr(ceilings_module, "_SECONDS_EACH", 0.0)
    measured = ceilings_module.measure_ceilings()
    assert (measured.form, measured.num_threads) == (ops.active_form(), 1)
    assert measured.processor
    rates = (measured.read_bytes_per_s, measured.fp32_operations_per_s, measured.int8_operations_per_s)
    assert all(rate > 0 for rate in rates)
    assert f"{measured.read_bytes_per_s / 1e9:.1f} GB/s" in measured.describe()


def test_ceilings_are_measured_once_and_again_when_asked(counted: list[Ceilings]) -> None:
    first = machine_ceilings()
    assert machine_ceilings() == first
    assert len(counted) == 1
    refreshed = machine_ceilings(refresh=True)
    assert refreshed != first
    assert machine_ceilings() == refreshed
    assert len(counted) == 2


def test_other_threads_have_ceilings_of_their_own(ops: Any, counted: list[Ceilings]) -> None:
    first = machine_ceilings()
    ops.set_num_threads(2)
    assert machine_ceilings() != first
    ops.set_num_threads(1)
    assert machine_ceilings() == first


@pytest.mark.parametrize("text", ["", "[]", "{", '{"other": 3}'])
def test_a_damaged_cache_costs_time_only(text: str, counted: list[Ceilings], tmp_path: Path) -> None:
    (tmp_path / "bitsmith").mkdir()
    path = tmp_path / "bitsmith" / "ceilings.json"
    path.write_text(text)
    assert machine_ceilings() == counted[0]
    assert len(json.loads(path.read_text())) == 1


def test_fields_of_another_release_are_measured_again(counted: list[Ceilings], tmp_path: Path) -> None:
    machine_ceilings()
    path = tmp_path / "bitsmith" / "ceilings.json"
    (key,) = json.loads(path.read_text())
    path.write_text(json.dumps({key: {"gigabytes": 3}}))
    assert machine_ceilings() == counted[1]
