"""What a report says of its own making, so that it can be challenged and repeated.

No time and no machine: two evaluations of the same artifacts give the same report, byte for byte.
"""

from collections.abc import Mapping
from typing import Any

from bitsmith.evaluate.contender import Contender
from bitsmith.evaluate.quick_suite import QuickPlan
from bitsmith.evaluate.task_files import TaskSelection

_NUM_SHOWN_IDS = 16

ERROR_BARS = (
    "Errors are over windows of text or over task items: how far the figure would move with other text or "
    "other questions of the same kind. They are not over random seeds: scoring has none, so another seed "
    "gives the same figures and the same errors. Both models saw the same ids, and every "
    "difference is paired."
)


def describe(
    contenders: Mapping[str, Contender],
    quick: QuickPlan | None,
    selection: TaskSelection | None,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    body: dict[str, Any] = {
        role: {
            "title": contender.title or contender.model.name,
            "name": contender.model.name,
            "content_digest": contender.digest,
            **contender.facts,
        }
        for role, contender in contenders.items()
    }
    body["versions"] = dict(versions)
    body["error_bars"] = ERROR_BARS
    if quick is not None:
        body |= _describe_quick(quick)
    if selection is not None:
        settings = selection.settings
        body["tasks"] = {
            "limit": settings.limit,
            "chat_template": settings.use_chat_template,
            "task_code_allowed": settings.allow_task_code,
            "files_sha256": {file.name: file.sha256 for file in selection.files},
        }
    return body


def _describe_quick(quick: QuickPlan) -> dict[str, Any]:
    num_windows, window_len = quick.windows.shape
    first = [int(i) for i in quick.windows[0][:_NUM_SHOWN_IDS]]
    return {
        "text": {
            "name": quick.text.name,
            "is_fallback": quick.text.is_fallback,
            **quick.text.provenance,
        },
        "windows": {
            "num_windows": num_windows,
            "window_len": window_len,
            "stride": f"{window_len} (windows do not overlap)",
            "packing": quick.packing,
            "bos": "first token of every window"
            if quick.encoder.adds_bos
            else "none (the tokenizer adds none)",
            "num_scored_tokens": num_windows * (window_len - 1),
            "seed": quick.settings.seed,
            "data_sha256": quick.data_digest,
        },
        "first_prompt": {"ids": first, "text": str(quick.encoder.tokenizer.decode(first))},
    }
