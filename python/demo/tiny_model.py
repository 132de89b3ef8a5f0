"""Writes a tiny Llama checkpoint with seeded weights: fp32, no tokenizer, nothing downloaded.

Weights are drawn wide (std 0.3) so that wrong KV bytes change the answers; the
dummy weights of vLLM are too small for that.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

NAME = "tiny-llama-4x256-seed0"
VOCABULARY = 1024
MAX_TOKENS = 4096


def write(directory: Path) -> None:
    """Writes the checkpoint into directory, once. Several may at the same time: it comes into place whole."""
    if (directory / "complete").exists():
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        torch_dtype="float32",
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{directory.name}-part-", dir=directory.parent))
    try:
        model.save_pretrained(part, safe_serialization=True)
        (part / "complete").touch()
        part.chmod(0o755)
        try:
            part.rename(directory)
        except OSError:
            # Somebody was faster, and has written the same; or a directory is left
            # that was never whole.
            if not (directory / "complete").exists():
                shutil.rmtree(directory)
                part.rename(directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
