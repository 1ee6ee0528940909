"""Teacher forcing inside a server's own decode loop: a logit processor that writes down log-probabilities, then forces.

A request that names `ForcedTokens` (`custom_logit_processor`, on a server with `--enable-custom-logit-processor`) and
`custom_params` of `forcing(...)` generates the given tokens, whatever the model would have said, and leaves a file of
what it would have said. Without given tokens it goes its own way, greedy or drawn. `sglang_ext.calibration.agreement`
compares two such files. One rank serves: each of several would write.

`--enable-custom-logit-processor` lets whoever reaches the server run code in it: for a loopback address only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor

from sglang_ext.calibration.agreement import Steps, load_steps
from sglang_ext.files import partial_file


@dataclass
class _Recording:
    """What one request has written down so far, on the device."""

    forced: list[int] | None
    compared: Tensor | None
    drawn: torch.Generator | None
    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)

    def add(self, logits: Tensor, rows: int, top: int) -> None:
        """One step's row [vocab], among so many rows of the batch; changes the logits where tokens are forced."""
        step = len(self.rows)
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        best = logprobs.argmax()
        ids = logprobs.topk(min(top, len(logprobs))).indices if self.compared is None else self.compared[step]
        token = best
        if self.forced is not None:
            token = torch.tensor(self.forced[step], device=logits.device)
        elif self.drawn is not None:
            token = logprobs.exp().multinomial(1, generator=self.drawn)[0]
        for name, value in (
            ("ids", ids),
            ("logprobs", logprobs[ids]),
            ("best", best),
            ("tokens", token),
            ("token_logprobs", logprobs[token]),
        ):
            self.columns.setdefault(name, []).append(value)
        self.rows.append(rows)
        if token is not best:
            logits.fill_(-torch.inf)
            logits[token] = 0.0

    def write(self, path: Path) -> None:
        """All steps, whole or not at all."""
        arrays: Any = {name: torch.stack(values).cpu().numpy() for name, values in self.columns.items()}
        with partial_file(path) as partial, partial.open("wb") as file:
            np.savez(file, **arrays, rows=np.array(self.rows))


_recordings: dict[str, _Recording] = {}


class ForcedTokens(CustomLogitProcessor):  # type: ignore[misc]
    """Writes down each step's log-probabilities, before it forces the step's token. See the module.

    Of a batch it sees the rows that name it; the count of these is written down as the step's `rows`.
    """

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        """`logits` [rows, vocab], changed in place."""
        for row, params in zip(logits, custom_param_list or [], strict=True):
            wanted = params["forcing"]
            if Path(wanted["out"]).exists():
                continue  # a step that ran ahead of the request's end
            recording = _recordings.get(wanted["out"])
            if recording is None:
                recording = _recordings[wanted["out"]] = _begun(wanted, logits.device)
            recording.add(row, len(logits), wanted["top"])
            if len(recording.rows) == wanted["steps"]:
                recording.write(Path(wanted["out"]))
                del _recordings[wanted["out"]]
        return logits


def _begun(wanted: dict[str, Any], device: torch.device) -> _Recording:
    if wanted["reference"] is None:
        seed = wanted["seed"]
        drawn = None if seed is None else torch.Generator(device).manual_seed(seed)
        return _Recording(None, None, drawn)
    reference: Steps = load_steps(wanted["reference"])
    return _Recording(reference.tokens.tolist(), torch.from_numpy(reference.ids).to(device), None)


def forcing(
    out: Path, steps: int, *, reference: Path | None = None, seed: int | None = None, top: int = 64
) -> dict[str, Any]:
    """The request's part of forcing: SGLang's fields, to be joined with its own.

    Args:
        out: file to be written by the server, on its machine.
        steps: tokens generated.
        reference: file whose tokens are forced, and at whose token ids log-probabilities are taken; None: the request
            goes its own way and takes them at the `top` best of each step.
        seed: where there is no reference: tokens are drawn at temperature 1; None: greedy.
        top: token ids of a step, where there is no reference; at most the vocabulary.

    Returns:
        Fields of a `/generate` request; its sampling parameters are greedy and ignore the end of text.
    """
    own = {"out": str(out), "steps": steps, "reference": reference and str(reference), "seed": seed, "top": top}
    sampling = {"temperature": 0.0, "max_new_tokens": steps, "ignore_eos": True, "custom_params": {"forcing": own}}
    return {"sampling_params": sampling, "custom_logit_processor": ForcedTokens.to_str()}
