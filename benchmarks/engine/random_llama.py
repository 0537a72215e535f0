"""Write a Llama of random weights as a Hugging Face directory: a shape in which overheads no longer hide.

    python benchmarks/engine/random_llama.py DIRECTORY --tokenizer MODEL_DIRECTORY

Hidden size 2048, 16 layers, intermediate size 8192, 32 heads over 8 of the cache, tied head; the vocabulary
is the tokenizer's. bf16. The weights are drawn, so only speed means something.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 2048, 16, 8192, 32, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    args = parser.parse_args()
    args.directory.mkdir(parents=True)
    config = json.loads((args.tokenizer / "config.json").read_text(encoding="utf-8"))
    vocab_size = config["vocab_size"]
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": True,
    }
    (args.directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for path in args.tokenizer.iterdir():
        if path.name.startswith(("tokenizer", "generation_config")):
            shutil.copy(path, args.directory)
    save_file(weights(vocab_size), args.directory / "model.safetensors", metadata={"format": "pt"})


def weights(vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator, dtype=torch.bfloat16)
        return values.mul_(columns**-0.5)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    tensors = {"model.embed_tokens.weight": normal(vocab_size, HIDDEN), "model.norm.weight": ones.clone()}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = ones.clone()
    return tensors


if __name__ == "__main__":
    main()
