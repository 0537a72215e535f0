"""Quantizes with nvidia-modelopt. A script for the Python that has it; it imports nothing of this program.

Usage: python -I modelopt_script.py REQUEST.json. The request names the model, the calibration tokens
(safetensors, `token_ids` [num_rows, seq_len]) or null, ModelOpt's presets, a group size or null, the
directory to write, and the file for what there is to say of the result. The script ends when its standard
input does: its caller is gone then.
"""

import copy
import hashlib
import importlib.metadata
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def main(request_path: str) -> None:
    import modelopt.torch.quantization as mtq  # type: ignore[import-not-found]
    import torch
    from modelopt.torch.export import export_hf_checkpoint  # type: ignore[import-not-found]
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    token_ids: Any = None
    digest = None
    if request["tokens"] is not None:
        token_ids = load_file(request["tokens"])["token_ids"]
        digest = hashlib.sha256(token_ids.numpy().tobytes()).hexdigest()
    # In fp32, as this program's own methods compute; the caller stores what stays dense in its own type.
    model: Any = AutoModelForCausalLM.from_pretrained(
        request["model"], dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    )
    model.eval()

    def calibrate(calibrated: Any) -> None:
        batches = token_ids.split(request["rows_per_batch"])
        with torch.no_grad():
            for index, batch in enumerate(batches, start=1):
                calibrated(batch, logits_to_keep=1, use_cache=False)
                print(f"batch {index} of {len(batches)}", flush=True)

    config = make_config([getattr(mtq, name) for name in request["presets"]], request["group_size"])
    start = time.perf_counter()
    mtq.quantize(model, config, None if token_ids is None else calibrate)
    with torch.inference_mode():
        export_hf_checkpoint(model, dtype=torch.float32, export_dir=request["out"])
    result = {
        "seconds": time.perf_counter() - start,
        "versions": {
            name: importlib.metadata.version(name) for name in ("nvidia-modelopt", "torch", "transformers")
        },
        "token_digest": digest,
    }
    Path(request["result"]).write_text(json.dumps(result), encoding="utf-8")


def make_config(presets: list[dict[str, Any]], group_size: int | None) -> dict[str, Any]:
    """One configuration of all presets' quantizers; the first preset's algorithm. Later entries win."""
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for preset in presets:
        entries += copy.deepcopy(preset["quant_cfg"])
    if group_size is not None:
        for entry in entries:
            _set_group_size(entry.get("cfg"), group_size)
    return {"quant_cfg": entries, "algorithm": presets[0].get("algorithm", "max")}


def _set_group_size(cfg: Any, group_size: int) -> None:
    """ModelOpt writes groups as block sizes of the last axis. cfg: one quantizer's, or a sequence of them."""
    for part in cfg if isinstance(cfg, list) else [cfg]:
        blocks = (part or {}).get("block_sizes")
        if isinstance(blocks, dict) and blocks.get(-1) is not None:
            blocks[-1] = group_size


def end_with_caller() -> None:
    while os.read(0, 4096):  # not sys.stdin: a buffered read would hold its lock when the program ends
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_caller, daemon=True).start()
    main(sys.argv[1])
