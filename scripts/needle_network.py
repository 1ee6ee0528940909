"""The needle model's network: Qwen3's architecture in plain torch, its optimizer and its export.

Weights of all layers are stacked ([layers, out, in]), so that one optimizer step and one compiled
function serve all of them. Activations are in the compute dtype, residual stream included, as in
the servers that run the exported checkpoint; norms and softmax are in float32.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scripts.needle import vocabulary as vocab

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; `vocab_size` is padded to a multiple of 64."""

    layers: int = 6
    width: int = 384
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 384
    vocab_size: int = (len(vocab.VOCABULARY) + 63) // 64 * 64
    rope_base: float = 1e6
    max_positions: int = 147456
    eps: float = 1e-6


# Qwen3's module name and the stacked parameter that holds its weight.
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, computed in float32."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [tokens, heads, head_dim] by cos, sin [tokens, head_dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def before_attention(
    x: Tensor, cos: Tensor, sin: Tensor, w: dict[str, Tensor], head_dim: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key, value [tokens, heads, head_dim] of x [tokens, width]."""
    normed = rms_norm(x, w["attn_norm"], eps)
    q, k, v = (F.linear(normed, w[name]).view(len(x), -1, head_dim) for name in "qkv")
    q = rotate(rms_norm(q, w["q_norm"], eps), cos, sin)
    k = rotate(rms_norm(k, w["k_norm"], eps), cos, sin)
    return q, k, v


def after_attention(x: Tensor, attended: Tensor, w: dict[str, Tensor], eps: float) -> Tensor:
    """Output projection and MLP, both with their residual; x [tokens, width]."""
    x = x + F.linear(attended, w["o"])
    normed = rms_norm(x, w["mlp_norm"], eps)
    return x + F.linear(F.silu(F.linear(normed, w["gate"])) * F.linear(normed, w["up"]), w["down"])


def cached_attention(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor]) -> Tensor:
    """Attention in float32 of q [batch, heads, new, dim] over a cache and itself, causal.

    `k`, `v` are [batch, kv_heads, new, dim]; the cache's are [1 or batch, kv_heads, old, dim].
    """
    batch, heads, new, dim = q.shape
    grouped = q.float().view(batch, k.shape[1], -1, new, dim) * dim**-0.5
    old = torch.einsum("bkgtd,bkld->bkgtl", grouped, past[0].float().expand(batch, -1, -1, -1))
    own = torch.einsum("bkgtd,bkld->bkgtl", grouped, k.float())
    hidden = torch.ones(new, new, dtype=torch.bool, device=q.device).triu(1)
    weights = torch.cat([old, own.masked_fill(hidden, -torch.inf)], dim=-1).softmax(-1)
    values = torch.cat([past[1].expand(batch, -1, -1, -1), v], dim=2).float()
    out = torch.einsum("bkgtl,bkld->bkgtd", weights, values)
    return out.reshape(batch, heads, new, dim).to(q.dtype)


class Needle(nn.Module):
    """A Qwen3 decoder with tied embeddings."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

        def matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape.layers, rows, columns) * gain * columns**-0.5)

        def norm(size: int, value: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.full((shape.layers, size), value))

        quiet = (2 * shape.layers) ** -0.5
        self.embed = nn.Parameter(torch.randn(shape.vocab_size, shape.width) * 0.05)
        self.q, self.k = matrix(queries, shape.width), matrix(keys, shape.width)
        self.v, self.o = matrix(keys, shape.width), matrix(shape.width, queries, quiet)
        self.gate, self.up = matrix(shape.mlp, shape.width), matrix(shape.mlp, shape.width)
        self.down = matrix(shape.width, shape.mlp, quiet)
        self.attn_norm, self.mlp_norm = norm(shape.width), norm(shape.width)
        # Above 1, so that one key can win against tens of thousands from the start.
        self.q_norm, self.k_norm = norm(shape.head_dim, 1.5), norm(shape.head_dim, 1.5)
        self.final_norm = nn.Parameter(torch.ones(shape.width))
        self.before, self.after = before_attention, after_attention

    def compile_blocks(self) -> None:
        """Compile what works token by token; one compilation serves all lengths and layers."""
        self.before = torch.compile(before_attention)
        self.after = torch.compile(after_attention)

    def layer_weights(self) -> list[dict[str, Tensor]]:
        """Weights per layer, matrices in the compute dtype."""
        stacks = {
            name: (weight.to(self.dtype) if name in _MATRICES else weight).unbind(0)
            for name, weight in self.named_parameters()
            if name not in ("embed", "final_norm")
        }
        return [{name: stack[i] for name, stack in stacks.items()} for i in range(self.shape.layers)]

    def rope(self, start: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin float32 [length, head_dim / 2] of positions from `start`."""
        half = torch.arange(0, self.shape.head_dim, 2, device=device, dtype=torch.float32)
        frequency = self.shape.rope_base ** -(half / self.shape.head_dim)
        angles = torch.arange(start, start + length, device=device)[:, None].float() * frequency
        return angles.cos(), angles.sin()

    def forward(self, ids: Tensor, cache: Cache | None = None, keep: bool = False) -> tuple[Tensor, Cache]:
        """Hidden states [batch, new, width] of ids [batch, new] that follow `cache`.

        The returned cache covers old and new tokens if `keep`, else it is empty; the old cache is
        not modified.
        """
        batch, new = ids.shape
        start = cache[0][0].shape[2] if cache else 0
        cos, sin = (t.repeat(batch, 1) for t in self.rope(start, new, ids.device))
        x = self.embed.to(self.dtype)[ids.reshape(-1)]
        kept: Cache = []
        for i, w in enumerate(self.layer_weights()):
            q, k, v = self.before(x, cos, sin, w, self.shape.head_dim, self.shape.eps)
            q, k, v = (t.view(batch, new, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
            if cache:
                attended = cached_attention(q, k, v, cache[i])
            else:
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            if keep and cache:
                k = torch.cat([cache[i][0].expand(batch, -1, -1, -1), k], dim=2)
                v = torch.cat([cache[i][1].expand(batch, -1, -1, -1), v], dim=2)
            if keep:
                kept.append((k, v))
            x = self.after(x, attended.transpose(1, 2).reshape(len(x), -1), w, self.shape.eps)
        return rms_norm(x, self.final_norm, self.shape.eps).view(batch, new, -1), kept

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., vocab_size] of hidden states [..., width]."""
        logits: Tensor = F.linear(hidden, self.embed.to(self.dtype))
        return logits.float()


class Muon(torch.optim.Optimizer):
    """Muon for stacks of matrices [layers, out, in]: momentum, orthogonalised, RMS 0.2.

    Jordan et al. 2024 for the iteration; Liu et al. 2025 (arXiv 2502.16982) for the scale, which
    lets it share AdamW's learning rate.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every stack."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                average = state["momentum"].mul_(group["momentum"]).add_(weight.grad)
                update = orthogonalise(weight.grad.add(average, alpha=group["momentum"]))
                scale = 0.2 * max(weight.shape[-2:]) ** 0.5
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.add_(update.to(weight.dtype), alpha=-group["lr"] * scale)


def orthogonalise(g: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices to g [layers, out, in], by five Newton-Schulz steps."""
    x: Tensor = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if tall else x


def optimizers(model: Needle, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings and norms."""
    fused = model.embed.is_cuda
    named = dict(model.named_parameters())
    rest = [weight for name, weight in named.items() if name not in _MATRICES]
    return [
        Muon([named[name] for name in _MATRICES], lr),
        torch.optim.AdamW(rest, lr, betas=(0.9, 0.98), weight_decay=0.0, fused=fused),
    ]


def export(model: Needle, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a Hugging Face checkpoint (Qwen3ForCausalLM, tied embeddings) with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.final_norm,
    }
    for theirs, ours in _NAMES.items():
        for i, weight in enumerate(getattr(model, ours).unbind(0)):
            tensors[f"model.layers.{i}.{theirs}.weight"] = weight
    stored = {name: t.detach().to("cpu", dtype).contiguous() for name, t in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    for name, content in _configs(model.shape, str(dtype).removeprefix("torch.")).items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _configs(shape: Shape, dtype: str) -> dict[str, dict[str, object]]:
    config: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_base,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": dtype,
        "eos_token_id": vocab.END,
        "pad_token_id": vocab.PAD,
        "bos_token_id": None,
    }
    special = [vocab.VOCABULARY[i] for i in (vocab.PAD, vocab.END, vocab.UNK)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": word, **flags, "special": True} for i, word in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab.WORD_TO_ID, "unk_token": special[2]},
    }
    return {
        "config.json": config,
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": vocab.END,
            "pad_token_id": vocab.PAD,
        },
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": special[0],
            "eos_token": special[1],
            "unk_token": special[2],
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_positions,
        },
    }


def load(folder: Path, dtype: torch.dtype, device: str) -> Needle:
    """The model of an exported checkpoint, weights in float32, computing in `dtype`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    known = asdict(Shape())
    renamed = {
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "mlp": "intermediate_size",
        "rope_base": "rope_theta",
        "max_positions": "max_position_embeddings",
        "eps": "rms_norm_eps",
    }
    shape = Shape(**{name: config[renamed.get(name, name)] for name in known})
    model = Needle(shape, dtype)
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        model.embed.copy_(tensors["model.embed_tokens.weight"])
        model.final_norm.copy_(tensors["model.norm.weight"])
        for theirs, ours in _NAMES.items():
            for i in range(shape.layers):
                getattr(model, ours)[i].copy_(tensors[f"model.layers.{i}.{theirs}.weight"])
    return model.to(device)
