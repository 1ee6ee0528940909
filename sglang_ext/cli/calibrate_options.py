"""What `sglang-ext calibrate` was asked for."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch

from sglang_ext.calibration.fit import FitSetting
from sglang_ext.calibration.measurement import MeasureSetting
from sglang_ext.config import SparseAttnConfig
from sglang_ext.methods.base import METHODS, did_you_mean


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    model_path: str
    data: str
    out: str
    report: str | None
    state: str
    resume: bool
    description: str
    measure: MeasureSetting
    fit: FitSetting
    decode_steps: int
    query_samples: int
    method: str
    device: str


def options_of(args: argparse.Namespace) -> Options:
    """Options of parsed arguments.

    Raises:
        ValueError: a method that is no index, or a value out of range.
    """
    config = SparseAttnConfig()
    method = args.method or config.method
    if method not in METHODS or method == "exact":
        names = ", ".join(name for name in METHODS if name != "exact")
        raise ValueError(
            f"expected --method to be one of {names}, got {method!r}; choose one of them{did_you_mean(method, METHODS)}"
        )
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Options(
        model_path=args.model_path,
        data=args.data,
        out=args.out,
        report=args.report,
        state=args.state or default_state(args.out),
        resume=not args.no_resume,
        description=args.description,
        measure=MeasureSetting(
            keep_ratio=args.keep_ratio,
            min_top_k=config.min_top_k,
            num_sink=config.num_sink_tokens,
            num_recent=config.num_recent_pages * 16,
            max_tokens=args.max_tokens,
        ),
        fit=FitSetting(
            num_anchors=args.anchors,
            tau=args.tau,
            block_average=args.block_average,
            representation=args.representation,
            criterion=args.criterion,
            dense_layers=args.dense_layers,
            num_channels=args.num_channels,
        ),
        decode_steps=args.decode_steps,
        query_samples=args.query_samples,
        method=method,
        device=device,
    )


def default_state(out: str) -> str:
    """Where measurements lie unless --state names another folder."""
    return f"{os.path.abspath(out)}.state"
