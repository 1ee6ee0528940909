"""One calibration: prompts through the engine, a file of measurements for each, then the profile and the report."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from prefix_index import ModelFingerprint, model_mismatch, printable
from sglang_ext import __version__
from sglang_ext.calibration.fit import Fit, FitSetting, fit_settings, with_flat_heads
from sglang_ext.calibration.judge import Candidate, Verdict, choose, percent, proposals
from sglang_ext.calibration.layer_statistics import MeasureSetting
from sglang_ext.calibration.measurement import (
    MEASUREMENT_VERSION,
    PromptInfo,
    PromptMeasurement,
    average,
    load_measurement,
    measure_prompt,
    measured_tokens,
    save_measurement,
)
from sglang_ext.calibration.prompts import (
    CalibrationPrompt,
    held_out_ids,
    prefix_digest,
    prompt_tokens,
    read_calibration_prompts,
)
from sglang_ext.calibration.report import Result, write_report
from sglang_ext.cli.arguments import checkpoint_options, names_cpu, sglang_option
from sglang_ext.cli.engines import CaptureSession
from sglang_ext.cli.judging import Judge
from sglang_ext.compat import versions
from sglang_ext.files import write_whole
from sglang_ext.fingerprint import config_digests, read_config, weights_digest
from sglang_ext.methods.ab_sparse import BLOCK_SIZES
from sglang_ext.methods.base import METHODS, did_you_mean
from sglang_ext.methods.profile import CalibrationData, Profile, ProfiledModel, Recommendation
from sglang_ext.options import SparseAttnConfig
from sglang_ext.profiles import local_folder

SETTINGS_FILE = "settings.json"
JUDGED_FOLDER = "judged"
_RENDERING = ("--chat-template", "--hf-chat-template-name", "--default-chat-template-kwargs", "--reasoning-parser")
_MEASUREMENT = re.compile(r"[0-9a-f]{32}\.safetensors")


class CalibrateJob:
    """One run of the command line's `args`: `measure` what is `missing`, then `finish`.

    Raises:
        ValueError: data (`PromptError`) or a method that cannot be used, or measurements made with other settings.
        OSError: a folder cannot be written to.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        config = SparseAttnConfig()
        self._args = args
        self._method = _index_method(args.method or config.method)
        self._measure = MeasureSetting(
            keep_ratio=args.keep_ratio,
            min_top_k=config.min_top_k,
            num_sink=config.num_sink_tokens,
            num_recent=config.num_recent_pages * 16,
            max_tokens=args.max_tokens,
        )
        self._fit = FitSetting(
            num_anchors=args.anchors,
            tau=args.tau,
            block_average=args.block_average,
            dense_layers=args.dense_layers,
            num_channels=args.num_channels,
        )
        largest = BLOCK_SIZES[-1]
        if args.block_average is not None and not 1.0 <= args.block_average <= largest:
            raise ValueError(
                f"expected --block-average in 1..{largest} tokens, got {args.block_average}; no head may have larger "
                "blocks"
            )
        self._device = args.device
        if self._device == "auto":
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._prompts, self._digest = read_calibration_prompts(args.data)
        self._held_out = held_out_ids(self._prompts)
        self._left_out: dict[str, str] = {}
        out = Path(os.path.abspath(args.out))
        self._folder = Path(args.state or f"{out}.state")
        if out.is_dir():
            raise IsADirectoryError(f"{out} is a folder; name a file in it with --out")
        if out.exists() and out.samefile(args.data):
            raise ValueError(f"expected --out to be a file of its own, got the prompts {args.out}; name another")
        for folder in filter(None, (out.parent, self._folder, args.report)):
            os.makedirs(folder, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # it can be written to
        self._model = None if args.no_resume else self._open_state()
        self.missing = [prompt for prompt in self._prompts if args.no_resume or not self._is_measured(prompt)]
        if not self.missing and self._model is not None:
            self._check_unloaded(self._model)
            then = "proposals are judged" if self.judges else "the profile is fitted without running the model"
            print(f"every prompt is measured already; {then}", file=sys.stderr)

    def measure(self, session: CaptureSession) -> None:
        """Run and measure every prompt that is missing. What cannot be measured is left out, with its reason.

        Raises:
            ValueError: a setting that does not fit the model, or measurements of another one.
            OSError: a measurement cannot be written.
        """
        self.check_layers(session.model.num_layers)
        if self._args.no_resume:
            self._forget()  # not before the engine runs
        self._check_model(session.model)
        done = len(self._prompts) - len(self.missing)
        bar = tqdm(self.missing, desc="calibrate", unit="prompt", initial=done, total=len(self._prompts))
        for prompt in bar:
            bar.set_postfix_str(prompt.id[:24])
            try:
                self._measure_one(session, prompt)
            except OSError:  # a full disk: no prompt's fault
                raise
            except Exception as error:  # one prompt must not end the job
                why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                self._left_out[prompt.id] = why
                tqdm.write(f"{prompt.id}: left out: {why}", file=sys.stderr)

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError where a setting does not fit a model of so many layers."""
        first = self._fit.first_layer(num_layers)
        anchors, most = self._fit.num_anchors, num_layers - first
        if anchors is not None and anchors > most:
            raise ValueError(f"expected --anchors in 1..{most} (the layers from {first} on), got {anchors}; lower it")

    def finish(self) -> int:
        """Fit, write profile and report; returns the exit status: 1 where a prompt was left out.

        Raises:
            ValueError: too few prompts were measured, or a setting does not fit the model.
            OSError: a measurement is gone, or the profile or the report cannot be written.
        """
        measured = [load_measurement(self._path(p.id)) for p in self._prompts if p.id not in self._left_out]
        halves: tuple[list[PromptMeasurement], list[PromptMeasurement]] = ([], [])
        for measurement, info in measured:
            halves[info.held_out].append(measurement)
        if not halves[0] or not halves[1] or self._model is None:
            raise ValueError(
                "expected measured prompts in the fitted and in the held-out half, got "
                f"{len(halves[0])} and {len(halves[1])}; no profile is written. Give more prompts, or correct those "
                "that were left out"
            )
        self.check_layers(self._model.num_layers)
        averages = average([measurement for measurement, _ in measured])
        infos = [info for _, info in measured]
        verdict = self._judged(average(halves[0]), infos) if self.judges else None
        if verdict is None:
            fit = with_flat_heads(fit_settings(averages, self._fit), averages)
            keep_ratio, reason = self._args.keep_ratio, "not judged: method and budget are those that were asked for"
        else:
            fit = self._fit_of(averages, verdict.chosen)
            keep_ratio, reason = verdict.chosen.keep_ratio, verdict.reason
        profile = self._profile(self._model, fit, keep_ratio, infos)
        profile.save(self._args.out)
        if self._args.report is not None:
            shown = Result(
                profile=profile,
                averages=averages,
                fit=fit,
                reason=reason,
                infos=infos,
                left_out=self._left_out,
                measure=self._measure,
                settings=self._fit,
                verdict=verdict,
            )
            write_report(shown, self._args.report)
        self._say(fit, keep_ratio, reason, len(infos))
        return 1 if self._left_out else 0

    def _measure_one(self, session: CaptureSession, prompt: CalibrationPrompt) -> None:
        setting = self._measure
        (ids, warnings), prefix_len = prompt_tokens(prompt, session.tokens)
        for warning in warnings:
            tqdm.write(f"{prompt.id}: warning: {warning}", file=sys.stderr)
        capture = session.capture(prompt.id, ids, prefix_len)
        least = setting.num_sink + setting.num_recent
        if capture.prefix_len <= least:
            raise ValueError(
                f"expected a prefix of more than {least} tokens (sink and recent window), got {capture.prefix_len}; "
                "give prompts as long as those that will be served"
            )
        measurement = measure_prompt(capture, setting, device=self._device)
        rows = measured_tokens(capture, setting.max_tokens)
        held_out = prompt.id in self._held_out
        info = PromptInfo(prompt.id, prompt.task, held_out, len(ids), capture.prefix_len, len(rows))
        save_measurement(measurement, info, self._path(prompt.id))

    @property
    def judges(self) -> bool:
        """Whether candidates are judged: where there are decode graphs, unless told."""
        wanted = self._args.judge
        graphs = torch.cuda.is_available() and not names_cpu(self._args.sglang_flags)
        return wanted == "yes" or (wanted == "auto" and graphs)

    def _judged(self, averages: PromptMeasurement, infos: Sequence[PromptInfo]) -> Verdict:
        """Serve the held-out prompts by each proposal, fitted on the others, and choose."""
        assert self._model is not None
        layers = self._model.num_layers - self._fit.first_layer(self._model.num_layers)
        anchors = len(fit_settings(averages, self._fit).anchors)
        given = self._fit.num_anchors is not None
        candidates = {
            one: self._profile(self._model, self._fit_of(averages, one), one.keep_ratio, infos)
            for one in proposals(anchors, layers, self._measure.keep_ratios, given=given)
        }
        held = {info.id for info in infos if info.held_out}
        groups: dict[str, list[CalibrationPrompt]] = {}
        for prompt in self._prompts:
            if prompt.id in held:
                groups.setdefault(prefix_digest(prompt), []).append(prompt)
        judge = Judge(self._args, list(groups.values()), self._folder / JUDGED_FOLDER, self._digest, self._model)
        return choose(judge.judge(candidates), self._args.max_kl)

    def _fit_of(self, averages: PromptMeasurement, candidate: Candidate) -> Fit:
        """The fit with a candidate's plan. Without a number of anchors it is the plan of a model without a profile."""
        layers = averages.oracle.shape[0] - self._fit.first_layer(averages.oracle.shape[0])
        setting = replace(self._fit, num_anchors=candidate.anchors or layers)
        fit = fit_settings(averages, setting)
        if candidate.anchors is None:
            return fit
        return with_flat_heads(fit, averages, self._measure.keep_ratios.index(candidate.keep_ratio))

    def _profile(self, model: ModelFingerprint, fit: Fit, keep_ratio: float, infos: Sequence[PromptInfo]) -> Profile:
        spec = METHODS[self._method].spec().to_dict()
        found = {"sglang-ext": __version__, "torch": str(torch.__version__), "sglang": versions.installed()}
        return Profile(
            model=msgspec.convert(model, ProfiledModel, from_attributes=True),
            block_sizes=tuple(map(tuple, fit.block_sizes.tolist())),
            layer_plan=fit.plan.to_dict(),
            channels=tuple(tuple(map(tuple, layer)) for layer in fit.channels.tolist()),
            dense_heads=fit.dense_heads,
            recommended=Recommendation(method=self._method, spec=spec, keep_ratio=keep_ratio),
            calibration=CalibrationData(
                prompts=len(infos),
                tokens=sum(info.prompt_tokens for info in infos),
                seed=0,
                versions={name: one for name, one in found.items() if one is not None},
                description=printable(self._args.description or Path(self._args.data).name),
            ),
        )

    def _say(self, fit: Fit, keep_ratio: float, reason: str, measured: int) -> None:
        where = f", report {self._args.report}" if self._args.report else ""
        print(
            f"{len(self._prompts)} prompts: {measured} measured, {len(self._left_out)} left out; anchors "
            f"{', '.join(map(str, fit.plan.anchor_layers))}; recommended {self._method} at {percent(keep_ratio)} "
            f"({reason}); profile {self._args.out}{where}",
            file=sys.stderr,
        )
        flat = ", ".join(f"layer {layer} head {head}" for layer, head in fit.flat_heads.nonzero().tolist())
        if flat:
            print(f"layers with a near-uniform KV head attend everything: {flat}", file=sys.stderr)
        if not fit.plan.with_dense(fit.whole_layers).anchor_layers:
            print("with this profile no layer selects: calibrate on longer prompts", file=sys.stderr)

    # -- the state -----------------------------------------------------------------------------------------------------

    def _path(self, prompt_id: str) -> Path:
        return self._folder / f"{hashlib.sha256(prompt_id.encode()).hexdigest()[:32]}.safetensors"

    def _files(self) -> list[Path]:
        """The measurements that are there; no other file is ever touched."""
        return [path for path in self._folder.glob("*.safetensors") if _MEASUREMENT.fullmatch(path.name)]

    def _forget(self) -> None:
        for path in self._files():
            path.unlink()
        (self._folder / SETTINGS_FILE).unlink(missing_ok=True)
        shutil.rmtree(self._folder / JUDGED_FOLDER, ignore_errors=True)

    def _settings(self) -> dict[str, Any]:
        """What measurements depend on, plain values."""
        return {
            "version": MEASUREMENT_VERSION,
            "data": self._digest,
            **asdict(self._measure),
            "block_sizes": list(BLOCK_SIZES),
            "decode_steps": self._args.decode_steps,
            "query_samples": self._args.query_samples,
            **self._rendering(),
        }

    def _rendering(self) -> dict[str, str]:
        """Flags that say what tokens a chat is, by name; of a file its digest, too."""
        if all(prompt.messages is None for prompt in self._prompts):
            return {}
        given = {name: sglang_option(self._args.sglang_flags, name) for name in _RENDERING}
        out = {name: value for name, value in given.items() if value is not None}
        for name, value in out.items():
            if os.path.isfile(value):
                digest = hashlib.sha256(Path(value).read_bytes()).hexdigest()
                out[name] = f"{os.path.basename(value)} (sha256 {digest[:16]})"
        return out

    def _open_state(self) -> ModelFingerprint | None:
        """The model of the measurements that are there; None where there are none."""
        path = self._folder / SETTINGS_FILE
        if not path.is_file():
            if self._files():
                raise ValueError(
                    f"expected {SETTINGS_FILE} beside the measurements in {self._folder}, got none; measure anew with "
                    "--no-resume"
                )
            return None
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            model = msgspec.convert(saved.pop("model"), ModelFingerprint)
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"expected settings in {path}, got {error}; measure anew with --no-resume") from error
        own = self._settings()
        for name in sorted({*own, *saved}, key=lambda name: (name != "version", name)):  # of others, other names
            if saved.get(name) != own.get(name):
                raise ValueError(
                    f"expected measurements with {name}={own.get(name)!r} in {self._folder}, got "
                    f"{saved.get(name)!r}; use that, name another folder with --state, or measure anew with --no-resume"
                )
        return model

    def _check_model(self, model: ModelFingerprint) -> None:
        if self._model is None:
            self._model = model
            content = {**self._settings(), "model": msgspec.to_builtins(model)}
            write_whole(self._folder / SETTINGS_FILE, msgspec.json.format(msgspec.json.encode(content), indent=1))
            return
        differs = model_mismatch(model, self._model)
        if differs:
            raise ValueError(
                f"expected measurements of this model in {self._folder}, got another ({differs}); name another folder "
                "with --state, or measure anew with --no-resume"
            )

    def _check_unloaded(self, model: ModelFingerprint) -> None:
        """Without the engine only a local model's RoPE settings and weights can be compared."""
        flags = self._args.sglang_flags
        folder = local_folder(self._args.model_path, *checkpoint_options(flags))
        if folder is None:
            return
        rope = model.rope_digest
        with suppress(OSError, TypeError, ValueError):  # no configuration, or none that SGLang could read
            rope = config_digests(read_config(folder, sglang_option(flags, "--json-model-override-args")), None)[1]
        if rope != model.rope_digest:
            raise ValueError(
                f"expected measurements with the RoPE settings of {folder} and --json-model-override-args, got those "
                "of others; name another folder with --state, or measure anew with --no-resume"
            )
        if sglang_option(flags, "--load-format") == "dummy":
            return
        with suppress(FileNotFoundError):
            if weights_digest(folder) != model.weights_digest:
                raise ValueError(
                    f"expected measurements of the weights in {folder}, got those of others; measure anew with "
                    "--no-resume"
                )

    def _is_measured(self, prompt: CalibrationPrompt) -> bool:
        path = self._path(prompt.id)
        if not path.is_file():
            return False
        try:
            load_measurement(path)
        except ValueError as error:
            print(f"{prompt.id}: measured again: {error}", file=sys.stderr)
            os.unlink(path)
            return False
        return True


def _index_method(method: str) -> str:
    if method not in METHODS or method == "exact":
        names = ", ".join(name for name in METHODS if name != "exact")
        raise ValueError(
            f"expected --method to be one of {names}, got {method!r}; choose one of them{did_you_mean(method, METHODS)}"
        )
    return method
