"""A small MLA model of random weights under the needle model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

NEEDLE = Path(__file__).resolve().parents[1] / "models" / "needle"
LAYERS, HEADS, RANK, ROPE, NOPE, VALUE = 3, 8, 64, 32, 48, 32
CONTEXT = 16384


def mla_model(folder: Path, **sizes: int) -> Path:
    """Writes the model; returns its folder. Its layers have no experts, its RoPE is YaRN by a factor of 1: SGLang's
    form for a CPU knows no other. `sizes` take the place of the configuration's own.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0, "original_max_position_embeddings": CONTEXT}
    needle = AutoConfig.from_pretrained(NEEDLE)
    config = AutoConfig.for_model(
        "deepseek_v2", vocab_size=needle.vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=None,
        kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=VALUE, n_routed_experts=4,
        moe_layer_freq=1, num_experts_per_tok=2, moe_intermediate_size=64, max_position_embeddings=CONTEXT,
        initializer_range=0.08, tie_word_embeddings=True, bos_token_id=needle.bos_token_id,
        eos_token_id=needle.eos_token_id, pad_token_id=needle.pad_token_id,
        rope_parameters={**yarn, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1},
    )  # fmt: skip
    config.update(sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    for path in NEEDLE.glob("token*"):
        shutil.copy(path, folder)
    return folder
