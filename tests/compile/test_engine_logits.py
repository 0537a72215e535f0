"""Scores do not depend on how requests are packed into steps."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bitsmith.compile.engine import Engine
from bitsmith.compile.engine_logits import EngineLogitsModel
from bitsmith.compile.limits import EngineLimits
from bitsmith.compile.reference_model import TransformersLogitsModel
from bitsmith.core.errors import Refused
from bitsmith.core.protocols import ScoringRequest

ModelMaker = Callable[..., Path]
EngineMaker = Callable[..., Engine]


def _requests() -> list[ScoringRequest]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(5, 5), (33, 4), (1, 1), (70, 70), (16, 1), (100, 33), (2, 1)]
    return [
        ScoringRequest(tuple(torch.randint(0, 301, (length,), generator=generator).tolist()), num_scored)
        for length, num_scored in sizes
    ]


@pytest.mark.parametrize("limits", [(1, 1000), (3, 40), (32, 7), (2, 100)])
def test_scores_are_the_same_however_they_are_packed(
    limits: tuple[int, int], make_model: ModelMaker, eager_engine: EngineMaker
) -> None:
    path = make_model("llama")
    engine = eager_engine(path)
    small = dataclasses.replace(engine, limits=EngineLimits(*limits, engine.max_model_len))
    requests = _requests()
    expected = list(TransformersLogitsModel(path).score(requests))
    actual = list(EngineLogitsModel(small).score(requests))
    for request, scored, reference in zip(requests, actual, expected, strict=True):
        assert scored.shape == (request.num_scored, 301)
        torch.testing.assert_close(scored, reference, rtol=1e-4, atol=1e-4)


def test_few_rows_of_logits_are_held_at_once(
    make_model: ModelMaker, eager_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = eager_engine(make_model("llama"))
    requests = _requests()
    expected = list(EngineLogitsModel(engine).score(requests))
    monkeypatch.setattr("bitsmith.compile.engine_logits._LOGITS_BYTES", 4 * 301 * 10)
    model = EngineLogitsModel(engine)
    rows: list[int] = []
    execute = Engine.execute

    def counted(self: Engine, *args: object) -> torch.Tensor:
        logits = execute(self, *args)  # type: ignore[arg-type]
        rows.append(len(logits))
        return logits

    monkeypatch.setattr(Engine, "execute", counted)
    for scored, reference in zip(model.score(requests), expected, strict=True):
        torch.testing.assert_close(scored, reference, rtol=1e-5, atol=1e-5)
    assert max(rows) <= 10


def test_a_sequence_beyond_the_limit_is_refused(make_model: ModelMaker, eager_engine: EngineMaker) -> None:
    model = EngineLogitsModel(eager_engine(make_model("llama"), max_model_len=50))
    with pytest.raises(Refused, match="51 tokens cannot be scored"):
        list(model.score([ScoringRequest(tuple(range(51)), 1)]))
