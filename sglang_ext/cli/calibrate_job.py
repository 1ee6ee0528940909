"""One calibration: prompts through the engine, a file of measurements for each, then the profile and the report."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from tqdm import tqdm

from prefix_index import ModelFingerprint
from sglang_ext import __version__
from sglang_ext.calibration.comparison import HeldOut, compare
from sglang_ext.calibration.fit import Fit, FitSetting, fit_settings, with_flat_heads
from sglang_ext.calibration.measurement import (
    MEASUREMENT_VERSION,
    Averages,
    MeasureSetting,
    PromptInfo,
    PromptMeasurement,
    average,
    load_measurement,
    measure_prompt,
    measured_tokens,
    save_measurement,
)
from sglang_ext.calibration.prompt_capture import PromptCapture
from sglang_ext.calibration.prompts import (
    CalibrationPrompt,
    held_out_ids,
    prefix_digest,
    prompt_tokens,
    read_calibration_prompts,
)
from sglang_ext.calibration.recommend import (
    Choice,
    RecipeQuality,
    default_recipes,
    measure_quality,
    quality_table,
    quality_tokens,
    recommend,
)
from sglang_ext.cli.calibrate_options import Options
from sglang_ext.cli.checks import check_writable
from sglang_ext.decode.select_op import graph_refusal
from sglang_ext.fingerprint import weights_digest
from sglang_ext.methods.profile import CalibrationData, Profile, ProfiledModel, Recommendation
from sglang_ext.prefill.prompt_tokens import TokenSource
from sglang_ext.profiles import local_folder

SETTINGS_FILE = "settings.json"
_MEASUREMENT = re.compile(r"[0-9a-f]{32}\.safetensors")


class StateError(ValueError):
    """Measurements that cannot be used; says what was expected, what came, what to do."""


class Session(Protocol):
    """What is needed of `CaptureSession`."""

    @property
    def model(self) -> ModelFingerprint: ...
    @property
    def tokens(self) -> TokenSource: ...
    def capture(
        self, name: str, input_ids: Sequence[int], *, prefix_len: int | None = None, decode_steps: int = 16
    ) -> PromptCapture: ...


@dataclass(frozen=True)
class Result:
    """All that a report shows."""

    profile: Profile
    averages: Averages
    fit: Fit
    held_out: HeldOut
    quality: list[RecipeQuality]
    choice: Choice
    infos: list[PromptInfo]
    left_out: dict[str, str]
    measure: MeasureSetting
    settings: FitSetting


class CalibrateJob:
    """One run: `measure` what is missing, then `finish`.

    Raises:
        PromptError: the data cannot be used.
        StateError: measurements are there that were made with other settings.
        OSError: a folder cannot be written to.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._prompts, self._digest = read_calibration_prompts(options.data)
        self._held_out = held_out_ids(self._prompts)
        self._recipes = default_recipes(options.method)
        self._left_out: dict[str, str] = {}
        self._folder = Path(options.state)
        out = Path(options.out).absolute()
        if out.is_dir():
            raise IsADirectoryError(f"{out} is a folder; name a file in it with --out")
        report = None if options.report is None else Path(options.report)
        for folder in filter(None, (out.parent, self._folder, report)):
            check_writable(folder)
        if not options.resume:
            self._forget()
        self._model = self._open_state()
        self.missing = [prompt for prompt in self._prompts if not self._is_measured(prompt)]
        if not self.missing and self._model is not None:
            self._check_weights(self._model)
            print("every prompt is measured already; the profile is fitted without running the model", file=sys.stderr)

    def measure(self, session: Session) -> None:
        """Run and measure every prompt that is missing. What cannot be measured is left out, with its reason.

        Raises:
            StateError: the measurements that are there are of another model.
            ValueError: a setting that does not fit the model.
        """
        self._check_model(session.model)
        self.check_layers(session.model.num_layers)
        done = len(self._prompts) - len(self.missing)
        bar = tqdm(self.missing, desc="calibrate", unit="prompt", initial=done, total=len(self._prompts))
        for prompt in bar:
            bar.set_postfix_str(prompt.id[:24])
            try:
                self._measure_one(session, prompt)
            except Exception as error:  # one prompt must not end the job
                why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                self._left_out[prompt.id] = why
                tqdm.write(f"{prompt.id}: left out: {why}", file=sys.stderr)

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError where a setting does not fit a model of so many layers."""
        first = self._options.fit.first_layer(num_layers)
        anchors, most = self._options.fit.num_anchors, num_layers - first
        if anchors is not None and anchors > most:
            raise ValueError(f"expected --anchors in 1..{most} (the layers from {first} on), got {anchors}; lower it")

    def finish(self) -> int:
        """Fit, write profile and report; returns the exit status: 1 where a prompt was left out.

        Raises:
            StateError: too few prompts were measured, or no recipe could be tried on one.
            ValueError: a setting that does not fit the model.
        """
        measured = [load_measurement(self._path(p.id)) for p in self._prompts if self._path(p.id).is_file()]
        halves: tuple[list[PromptMeasurement], list[PromptMeasurement]] = ([], [])
        for measurement, info in measured:
            halves[info.held_out].append(measurement)
        if not halves[0] or not halves[1] or self._model is None:
            raise StateError(
                "expected measured prompts in the fitted and in the held-out half, got "
                f"{len(halves[0])} and {len(halves[1])}; no profile is written. Give more prompts, or correct those "
                "that were left out"
            )
        # Recipes are not tried on prompts without a token behind the prefix.
        tried = [one.quality for one in halves[1] if one.quality.numel()]
        if not tried:
            raise StateError(
                "expected a held-out prompt with a token behind its prefix to try the recipes on, got none; no profile "
                'is written. Give prompts a "question", and measure anew with --no-resume'
            )
        averages = average([measurement for measurement, _ in measured])
        fit = fit_settings(averages, self._options.fit)
        tasks = [info.task for _, info in measured if info.held_out]
        prefixes = {prompt.id: prefix_digest(prompt) for prompt in self._prompts}
        groups = [prefixes[info.id] for _, info in measured if info.held_out]
        held_out = compare(*halves, tasks, self._options.fit, groups)
        quality = quality_table(torch.stack(tried), list(self._recipes), self._options.measure.keep_ratios)
        choice = self._choice(quality, fit)
        fit = with_flat_heads(
            fit, averages, self._options.fit, self._options.measure.keep_ratios.index(choice.keep_ratio)
        )
        infos = [info for _, info in measured]
        profile = self._profile(self._model, fit, choice, infos)
        profile.save(self._options.out)
        if self._options.report is not None:
            from sglang_ext.calibration.report import write_report

            result = Result(
                profile, averages, fit, held_out, quality, choice, infos, self._left_out, self._options.measure,
                self._options.fit,
            )  # fmt: skip
            write_report(result, self._options.report)
        self._say(fit, choice, len(infos))
        return 1 if self._left_out else 0

    def _measure_one(self, session: Session, prompt: CalibrationPrompt) -> None:
        options = self._options
        (ids, warnings), prefix_len = prompt_tokens(prompt, session.tokens)
        for warning in warnings:
            tqdm.write(f"{prompt.id}: warning: {warning}", file=sys.stderr)
        capture = session.capture(prompt.id, ids, prefix_len=prefix_len, decode_steps=options.decode_steps)
        least = options.measure.num_sink + options.measure.num_recent
        if capture.prefix_len <= least:
            raise ValueError(
                f"expected a prefix of more than {least} tokens (sink and recent window), got {capture.prefix_len}; "
                "give prompts as long as those that will be served"
            )
        held_out = prompt.id in self._held_out
        quality = None
        if held_out and len(quality_tokens(capture)):
            quality = measure_quality(
                capture,
                self._recipes,
                range(options.fit.first_layer(capture.num_layers), capture.num_layers),
                min_top_k=options.measure.min_top_k,
                keep_ratios=options.measure.keep_ratios,
                num_sink=options.measure.num_sink,
                num_recent=options.measure.num_recent,
                device=options.device,
            )
        measurement = measure_prompt(capture, options.measure, device=options.device, quality=quality)
        rows = measured_tokens(capture, options.measure.max_tokens)
        info = PromptInfo(prompt.id, prompt.task, held_out, len(ids), capture.prefix_len, len(rows))
        save_measurement(measurement, info, self._path(prompt.id))

    def _profile(self, model: ModelFingerprint, fit: Fit, choice: Choice, infos: Sequence[PromptInfo]) -> Profile:
        return Profile(
            model=ProfiledModel(
                num_layers=model.num_layers,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                config_digest=model.config_digest,
            ),
            block_sizes=tuple(map(tuple, fit.block_sizes.tolist())),
            layer_plan=fit.plan.to_dict(),
            channels=tuple(tuple(map(tuple, layer)) for layer in fit.channels.tolist()),
            dense_heads=fit.dense_heads,
            recommended=Recommendation(method=choice.name, spec=choice.spec, keep_ratio=choice.keep_ratio),
            calibration=CalibrationData(
                prompts=len(infos),
                tokens=sum(info.prompt_tokens for info in infos),
                seed=0,
                versions=_versions(),
                description=self._options.description or Path(self._options.data).name,
            ),
        )

    def _choice(self, quality: Sequence[RecipeQuality], fit: Fit) -> Choice:
        """What is recommended: the method that was asked for, or another one that decode graphs hold."""
        assert self._model is not None
        asked = self._options.method
        held = {name: spec for name, spec in self._recipes.items() if name == asked or graph_refusal(name) is None}
        choice = recommend(quality, held, anchor_share=fit.plan.anchor_share, head_dim=self._model.head_dim)
        others = ", ".join(name for name in self._recipes if name not in held)
        if not others:
            return choice
        reason = f"{choice.reason}; not recommended in any case, as decode graphs do not hold them yet: {others}"
        return msgspec.structs.replace(choice, reason=reason)

    def _say(self, fit: Fit, choice: Choice, measured: int) -> None:
        where = f", report {self._options.report}" if self._options.report else ""
        print(
            f"{len(self._prompts)} prompts: {measured} measured, {len(self._left_out)} left out; anchors "
            f"{', '.join(map(str, fit.plan.anchor_layers))}; recommended {choice.name} at {choice.keep_ratio:.0%}; "
            f"profile {self._options.out}{where}",
            file=sys.stderr,
        )
        flat = ", ".join(f"layer {layer} head {head}" for layer, head in fit.flat_heads.nonzero().tolist())
        if flat:
            print(f"layers with a near-uniform KV head attend everything: {flat}", file=sys.stderr)
        if not fit.plan.with_dense(fit.whole_layers).anchor_layers:
            print("with this profile no layer selects: calibrate on longer prompts", file=sys.stderr)
        refusal = graph_refusal(choice.name)
        if refusal:
            print(f"inside decode graphs a server uses no index with this profile: {refusal}", file=sys.stderr)

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

    def _settings(self) -> dict[str, Any]:
        """What measurements depend on, plain values."""
        options = self._options
        measure = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(options.measure).items()}
        return {
            "version": MEASUREMENT_VERSION,
            "data": self._digest,
            **measure,
            "decode_steps": options.decode_steps,
            "query_samples": options.query_samples,
            "dense_layers": list(options.fit.dense_layers),
            "recipes": {name: spec.to_dict() for name, spec in self._recipes.items()},
        }

    def _open_state(self) -> ModelFingerprint | None:
        """The model of the measurements that are there; None where there are none."""
        path = self._folder / SETTINGS_FILE
        if not path.is_file():
            if self._files():
                raise StateError(
                    f"expected {SETTINGS_FILE} beside the measurements in {self._folder}, got none; measure anew with "
                    "--no-resume"
                )
            return None
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            model = msgspec.convert(saved.pop("model"), ModelFingerprint)
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, ValueError) as error:
            raise StateError(f"expected settings in {path}, got {error}; measure anew with --no-resume") from error
        own = self._settings()
        for name in sorted({*own, *saved}):
            if saved.get(name) != own.get(name):
                raise StateError(
                    f"expected measurements with {name}={own.get(name)!r} in {self._folder}, got "
                    f"{saved.get(name)!r}; use that, name another folder with --state, or measure anew with --no-resume"
                )
        return model

    def _check_model(self, model: ModelFingerprint) -> None:
        if self._model is None:
            self._model = model
            content = {**self._settings(), "model": msgspec.to_builtins(model)}
            partial = self._folder / f".{SETTINGS_FILE}.partial"
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
            partial.replace(self._folder / SETTINGS_FILE)
            return
        for name in ModelFingerprint.__struct_fields__:
            mine, theirs = getattr(model, name), getattr(self._model, name)
            if mine != theirs:
                raise StateError(
                    f"expected measurements of this model ({name}={mine!r}) in {self._folder}, got another "
                    f"({theirs!r}); name another folder with --state, or measure anew with --no-resume"
                )

    def _check_weights(self, model: ModelFingerprint) -> None:
        """Without the engine only a local model's weights can be compared."""
        folder = local_folder(self._options.model_path)
        if folder is None:
            return
        with suppress(FileNotFoundError):
            if weights_digest(folder) != model.weights_digest:
                raise StateError(
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


def _versions() -> dict[str, str]:
    found = {"sglang-ext": __version__, "torch": str(torch.__version__)}
    with suppress(metadata.PackageNotFoundError):
        found["sglang"] = metadata.version("sglang")
    return found
