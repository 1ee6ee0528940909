"""How much memory and disk the indexes of some prompts take: for `doctor --size`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import msgspec
import torch

from sglang_ext.cli.arguments import checkpoint_options
from sglang_ext.cli.checks import preview_server
from sglang_ext.cli.index.text import size
from sglang_ext.compat.memory import promised_bytes
from sglang_ext.config import parse_profiled
from sglang_ext.decode.select_op import graph_refusal
from sglang_ext.methods import method_specs
from sglang_ext.methods.layer_plan import heads_of_rank
from sglang_ext.options import KV_PER_INDEX_BYTE, SparseAttnConfig
from sglang_ext.prefill.builder import covered_tokens, need_queries, short_refusal
from sglang_ext.prefill.recorder import sampled_tokens
from sglang_ext.prefill.sizes import IndexSizes, index_sizes
from sglang_ext.prefix.residency import STAGING_BYTES
from sglang_ext.profiles import check_profile, local_folder


class Row(msgspec.Struct, frozen=True):
    """Bytes of one prompt, and of all of them."""

    what: str
    one: int
    all: int
    where: str


class Sizes(msgspec.Struct, frozen=True):
    """What is printed. Device memory is that of one tensor-parallel rank."""

    method: str
    kv_dtype: str
    index_tokens: int
    rows: list[Row]
    notes: list[str]


def compute_sizes(args: argparse.Namespace) -> Sizes:
    """Of `--prompts` prompts of `--tokens` tokens each.

    Raises:
        EngineStartError: the model is not here, or SGLang refuses the flags.
        ValueError: the settings, the profile or the number of tokens cannot be used.
        OSError: the model's configuration cannot be read.
    """
    preview = preview_server(args, plugin=False)
    folder = local_folder(args.model_path, *checkpoint_options(args.sglang_flags))
    config, profile = parse_profiled(args.sparse_attn_config, folder)
    model = preview.model(weights=False)
    if profile is not None:
        check_profile(profile, model)
    tokens = covered_tokens(args.tokens, config.build_align)
    if (short := short_refusal(args.tokens, config)) is not None:
        raise ValueError(f"--tokens: {short}")
    index = index_sizes(config, profile, model, tokens, args.tp)
    heads = max(len(heads_of_rank(model.num_kv_heads, rank, args.tp)) for rank in range(args.tp))
    itemsize = getattr(torch, model.kv_dtype).itemsize
    kv = model.num_layers * args.tokens * heads * model.kv_width * itemsize
    count = args.prompts
    staging = min(index.device, max(STAGING_BYTES, -(-index.device // model.num_layers)))
    rows = [
        Row("index, file", index.file, count * index.file, "disk; as much host DRAM in a store service's memory"),
        Row("index, resident", index.device, count * index.device, "device of each rank, within index_gpu_bytes"),
        Row("KV of the prompt", kv, count * kv, "device of each rank, in SGLang's pool"),
        Row("while one loads", staging, staging, "host DRAM of each rank, at most"),
    ]
    if need_queries(method_specs(config), profile, model.head_dim):
        sampled = sampled_tokens(config.query_samples, preview.num_qo_heads // model.num_kv_heads)
        one = model.num_layers * sampled * preview.num_qo_heads * model.head_dim * preview.dtype.itemsize
        rows.append(
            Row("sampled queries", one, min(count * one, config.sample_host_bytes), 'host DRAM, with "build": "shared"')
        )
    return Sizes(config.method, model.kv_dtype, tokens, rows, list(_notes(config, tokens, args.tokens, count, index)))


def _notes(config: SparseAttnConfig, covered: int, tokens: int, count: int, index: IndexSizes) -> Iterator[str]:
    """What the figures mean for a server of these settings."""
    if covered < tokens:
        yield f"An index covers {covered} of {tokens} tokens (build_align {config.build_align})."
    if index.device:
        given = config.index_gpu_bytes
        if given is None:
            pool = size(count * index.device * KV_PER_INDEX_BYTE)
            yield f"Indexes may have 5% of each rank's KV pool: one of {pool} holds {count} of them at a time."
        else:
            held = min(count, given // index.device)
            yield f"index_gpu_bytes, {size(given)}, holds {held} of {count} indexes at a time."
    refusal = graph_refusal(config.method)
    if refusal is not None:
        yield f"On a GPU its indexes are used without decode graphs only: {refusal}."
    else:
        promised = size(promised_bytes(config, 0, graphs=True) - (config.index_gpu_bytes or 0))
        yield f"On a GPU the plugin keeps {promised} of each rank's memory beside KV pool and indexes, for buffers."
