"""Candidates of a calibration behind the real engine: dense's tokens forced through each one's decode steps."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from prefix_index import ModelFingerprint, model_mismatch
from sglang_ext import __version__
from sglang_ext.calibration.agreement import Agreement, agreement, check_generated, load_steps
from sglang_ext.calibration.judge import Candidate, Judged
from sglang_ext.calibration.prompts import CalibrationPrompt, prompt_tokens
from sglang_ext.cli.arguments import names_cpu, tp_size
from sglang_ext.cli.engines import plugin_engine
from sglang_ext.compat import versions
from sglang_ext.files import write_whole
from sglang_ext.methods.profile import Profile
from sglang_ext.options import Build, DecodePath, PrefetchPolicy
from sglang_ext.prefill.prompt_tokens import TokenSource

STEPS = 48
"""Tokens of a forced answer; the first is prefill's."""
SHORT, LONG, LONG_ON_CPU = 8, 136, 40
"""Tokens of the two answers whose difference in time is that of their steps. A GPU's steps are so short that few of
them are lost in what a prefill's time varies by."""
REPETITIONS = 5
MOST_PROMPTS = 8
"""Held-out prefixes that candidates are judged behind, evenly spread over those there are."""


class Judge:
    """Judges candidates one by one; what was judged is read from the folder.

    Args:
        args: of the command.
        prompts: held-out ones, at least one; a group for each prefix.
        folder: of results and dense's steps; those of another model, other prompts, flags, rows, versions or another
            device lie beside them.
        data: digest of the file that the prompts are from.
        model: that was measured, which no other may be judged for.

    Raises:
        ValueError: flags of several ranks, each of which would write down its steps.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        prompts: Sequence[Sequence[CalibrationPrompt]],
        folder: Path,
        data: str,
        model: ModelFingerprint,
    ) -> None:
        self._model_path, self._flags, self._rows = args.model_path, args.sglang_flags, args.rows
        self._model = model
        self._long = LONG_ON_CPU if names_cpu(self._flags) else LONG
        most = min(len(prompts), MOST_PROMPTS)
        self._prompts = [prompts[place * len(prompts) // most] for place in range(most)]
        self._asked: list[list[list[int]]] = []
        self._prefixes: list[list[int]] = []
        if tp_size(self._flags) > 1:
            raise ValueError("expected one rank to judge with, got --tp-size above 1; leave it out, or say --judge no")
        ids = [[prompt.id for prompt in group] for group in self._prompts]
        of = [data, msgspec.to_builtins(model), ids, self._flags, self._rows, STEPS, self._long, _machine(self._flags)]
        own = hashlib.sha256(json.dumps(of).encode()).hexdigest()
        self._folder = folder / own[:16]
        self._results = self._folder / "judged.json"
        self._references = self._folder / "dense"

    def judge(self, candidates: Mapping[Candidate, Profile]) -> list[Judged]:
        """Results in the order of the candidates, each of which is given with the profile that says its plan.

        Raises:
            ValueError: a prompt without room for what is forced behind it, or one that SGLang refuses; an engine of
                another model.
            EngineStartError, EngineDiedError: see `OfflineEngine`.
        """
        digests = {one: profile.digest() for one, profile in candidates.items()}
        # A plan of other settings has another profile.
        known = {one.candidate: one for one in self._known() if digests.get(one.candidate) == one.profile}
        missing = [candidate for candidate in candidates if candidate not in known]
        bar = tqdm(missing, desc="judge", unit="candidate", initial=len(known), total=len(candidates))
        checked = self._references / "checked"  # behind a run that failed they may not be what they should
        references = [checked, *(path for _, path in self._dense())]
        if missing and not all(path.exists() for path in references):
            bar.set_postfix_str("dense")
            self._references.mkdir(parents=True, exist_ok=True)
            for path in references:
                path.unlink(missing_ok=True)
            self._measure({"build": Build.OFF.value, "decode_path": DecodePath.STOCK.value}, None)
            checked.touch()
        for candidate in bar:
            bar.set_postfix_str(candidate.name)
            known[candidate] = self._judge_one(candidate, candidates[candidate])
            write_whole(self._results, msgspec.json.encode(list(known.values())))
        return [known[candidate] for candidate in candidates]

    def _known(self) -> list[Judged]:
        if not self._results.exists():
            return []
        try:
            return msgspec.json.decode(self._results.read_bytes(), type=list[Judged])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            print(f"expected results in {self._results}, got {error}; judging anew", file=sys.stderr)
            return []

    def _dense(self) -> list[tuple[int, Path]]:
        """Prompt and file of dense's own of each row."""
        pairs = itertools.product(range(len(self._prompts)), range(self._rows))
        return [(number, self._references / f"{number}-{row}.npz") for number, row in pairs]

    def _judge_one(self, candidate: Candidate, profile: Profile) -> Judged:
        path = self._folder / f"{candidate.anchors or 'all'}-{candidate.keep_ratio:g}.json"
        profile.save(path)
        settings = {
            "build": Build.PREFILL.value,
            "decode_path": DecodePath.SPARSE.value,
            "prefetch_policy": PrefetchPolicy.WAIT_COMPLETE.value,
            "share_prefixes": True,
            "keep_ratio": candidate.keep_ratio,
            "profile": str(path.absolute()),
        }
        found: list[list[Agreement]] = [[] for _ in self._prompts]
        with tempfile.TemporaryDirectory(prefix="sparse-attn-forced-") as forced:
            ms, state = self._measure(settings, Path(forced))
            for number, reference in self._dense():
                one = agreement(load_steps(reference), load_steps(Path(forced) / reference.name))
                assert one is not None
                found[number].append(one)
        rows = [one for group in found for one in group]
        lengths = [len(prefix) for prefix in self._prefixes]
        sparse = state["sparse_rows"]
        return Judged(
            candidate=candidate,
            profile=profile.digest(),
            steps=sum(one.steps for one in rows),
            kl=[fmean(one.kl for one in group) for group in found],
            top1=fmean(one.top1 for one in rows),
            ms=ms,
            least_tokens=min(lengths),
            most_tokens=max(lengths),
            sparse_share=sparse / max(sparse + state["dense_rows"], 1),
        )

    def _measure(self, settings: dict[str, Any], folder: Path | None) -> tuple[list[float], dict[str, Any]]:
        """Force dense's tokens behind every prompt into files of the folder; None: make dense's own, drawn. Returns
        milliseconds of a step behind the longest prompt, none where dense's own are made, and the plugin's counters.
        """
        from sglang_ext.compat.forced_tokens import forcing

        with tempfile.TemporaryDirectory(prefix="sparse-attn-judge-") as store:
            flags = [*self._flags, "--enable-custom-logit-processor"]
            graphs = [] if "--cuda-graph-bs-decode" in flags else ["--cuda-graph-bs-decode", "1", str(self._rows)]
            with plugin_engine(self._model_path, flags, store, json.dumps(settings), graphs) as engine:
                differs = model_mismatch(msgspec.convert(engine.state()["model"], ModelFingerprint), self._model)
                if differs:
                    raise ValueError(
                        f"expected to judge the model that was measured, got another ({differs}); use the flags of the "
                        "measurement, name another folder with --state, or measure anew with --no-resume"
                    )
                self._tokenize(engine.tokens, engine.context_len)
                for number, prefix in enumerate(self._prefixes):
                    engine.generate([_plain(number, prefix, 1)])
                    references = [path for at, path in self._dense() if at == number]
                    outs = references if folder is None else [folder / path.name for path in references]
                    requests = [
                        _behind(number, ids, forcing(out, STEPS, reference=None if folder is None else path, seed=row))
                        for row, (ids, out, path) in enumerate(zip(self._asked[number], outs, references, strict=True))
                    ]
                    for out, reply in zip(outs, engine.generate(requests), strict=True):
                        check_generated(out, reply["output_ids"])
                    together = int(max(load_steps(out).rows.max() for out in outs))
                    if together < self._rows:
                        raise ValueError(
                            f"expected {self._rows} requests to decode together, got {together}; raise "
                            "--max-running-requests or --max-total-tokens, lower --rows, or say --judge no"
                        )
                state = engine.state()
                return [] if folder is None else self._times(engine), state

    def _tokenize(self, source: TokenSource, context_len: int) -> None:
        """Token ids of the prefixes, and of the rows behind each: its questions in turns."""
        if self._asked:
            return
        for group in self._prompts:
            found = [(tokens.ids, length) for tokens, length in (prompt_tokens(one, source) for one in group)]
            more = max(STEPS, self._long)
            longest, room = max(len(ids) for ids, _ in found), context_len - 1 - more
            if longest > room:
                raise ValueError(
                    f"{group[0].id}: expected at most {room} tokens, so that {more} more fit, got {longest}; "
                    "raise --context-length, shorten the prompt, or say --judge no"
                )
            ids, length = found[0]
            self._prefixes.append(ids[:length])
            self._asked.append([found[row % len(found)][0] for row in range(self._rows)])

    def _times(self, engine: Any) -> list[float]:
        """Milliseconds of a step behind the longest prompt: what more tokens take."""
        number, asked = max(enumerate(self._asked), key=lambda pair: len(pair[1][0]))

        def seconds(tokens: int) -> float:
            begun = time.perf_counter()
            engine.generate([_plain(number, ids, tokens) for ids in asked])
            return time.perf_counter() - begun

        seconds(SHORT)
        return [1e3 * (seconds(self._long) - seconds(SHORT)) / (self._long - SHORT) for _ in range(REPETITIONS)]


def _machine(sglang_flags: Sequence[str]) -> list[str | None]:
    """What times and the last bits of probabilities depend on: versions, and the device that SGLang would take."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and not names_cpu(sglang_flags) else "cpu"
    return [__version__, versions.installed(), versions.installed("torch"), device]


def _plain(number: int, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    return _behind(number, ids, {"sampling_params": sampling})


def _behind(number: int, ids: Sequence[int], fields: dict[str, Any]) -> dict[str, Any]:
    """A request of that prompt, which shares nothing with others': not even a beginning that all have (a BOS, a chat
    template's) may come from the prefix cache, or no index is built of the prefix.
    """
    return {"input_ids": list(ids), "extra_key": f"judged-{number}", **fields}
