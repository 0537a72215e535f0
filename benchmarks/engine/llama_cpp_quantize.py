"""Quantize a GGUF file by llama.cpp's own quantizer; runs where llama-cpp-python is.

    python llama_cpp_quantize.py MODEL.gguf Q4_0

Writes MODEL.Q4_0.gguf beside it. llama.cpp's defaults hold: its log says which type the head gets.
"""

import argparse
import ctypes
from pathlib import Path

import llama_cpp as ll  # type: ignore[import-not-found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("type", help="Q4_0, Q8_0 ...")
    args = parser.parse_args()
    target = args.model.with_suffix(f".{args.type}.gguf")
    ll.llama_backend_init()
    params = ll.llama_model_quantize_default_params()
    params.ftype = getattr(ll, f"LLAMA_FTYPE_MOSTLY_{args.type}")
    params.allow_requantize = True
    paths = (str(args.model).encode(), str(target).encode())
    if ll.llama_model_quantize(*paths, ctypes.byref(params)) != 0:
        raise RuntimeError("llama_model_quantize failed")
    print(target)


if __name__ == "__main__":
    main()
