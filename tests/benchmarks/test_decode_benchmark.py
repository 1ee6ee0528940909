"""`benchmarks/decode.py`: its table and plot from the rows in the repository, its flags, and once a real engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.decode.drafts import DraftLengths
from sglang_ext.forwards import Forwards
from sglang_ext.prefix.requests import Attachment
from tests.benchmarks.results import RESULTS, ROOT, cells, document, documented_table, prose, rows_of

ALONE, GRID, BEFORE, AFTER, DEFAULT = (
    RESULTS / f"decode-h200-{name}.jsonl" for name in ("one-prefix", "grid", "house-before", "house-after", "default")
)
KEPT = RESULTS / "answers-cpu-kept.jsonl.xz"
ORIGIN: dict[str, Any] = {"device": "GPU", "shape": "tiny", "page": 16, "config": {}, "flags": [], "tokens": 40}
ORIGIN |= {"start": 0, "plan": "kascade", "prefixes": 1}
BATCHES = ("1", "8", "32")
SETTLING = 2
"""Steps in which requests that share slots are not known to do so."""


def row(engine: str, path: str, ms: float, **more: Any) -> dict[str, Any]:
    return {**ORIGIN, "engine": engine, "path": path, "context": 1024, "batch": 8, "ms": ms, **more}


def printed(bench: Any, *paths: Path) -> list[list[str]]:
    """Cells of the table of result files, its header first."""
    return cells(bench.decode.table(bench.decode.engines.read([str(path) for path in paths])))


def by_size(bench: Any, *paths: Path) -> dict[str, dict[tuple[str, str], str]]:
    """By engine, without its configuration, and (tokens, batch): the cell of the printed table."""
    header, _, *rows = printed(bench, *paths)
    names = [name.split(", {")[0] for name in header]
    return {name: {(one[1], one[2]): one[at] for one in rows} for at, name in enumerate(names) if at > 2}


def by_median(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """Median ms of the starts, by engine, path, tokens and batch."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for one in rows:
        found.setdefault((one["engine"], one["path"], one["context"], one["batch"]), []).append(one["ms"])
    return {key: median(of) for key, of in found.items()}


def test_the_table_of_what_the_plugin_chooses_is_the_rows(bench: Any) -> None:
    found = [by_size(bench, path)["auto, anchors"] for path in (ALONE, GRID)]
    chosen = {key: ms for of in found for key, ms in of.items() if ms}
    shown = documented_table("benchmarks", "| prefixes x tokens | batch 1 |")
    cells_shown = {(tokens, batch): ms for tokens, *times in shown for batch, ms in zip(BATCHES, times, strict=True)}
    assert {key: ms for key, ms in cells_shown.items() if ms} == chosen


def test_the_sentences_about_four_layers_and_older_commits_are_the_rows() -> None:
    text = prose("benchmarks")
    after, before = (by_median(rows_of(path)) for path in (AFTER, BEFORE))
    ratios = [ms / before[key] for key, ms in after.items()]
    assert f"within {min(ratios):.3f} and {max(ratios):.3f} (`decode-h200-house" in text
    assert max(ratios) <= 1.01
    few = (f"{of['sparse', 'sparse', 131072, batch]:.2f}" for of in (before, after) for batch in (1, 8, 32))
    assert "took {}, {} and {} ms behind 131,072, and takes {}, {} and {}.".format(*few) in text
    stock = [ms / before[key] for key, ms in after.items() if key[1] == "stock"]
    assert f"Requests that opt out: {min(stock):.3f} to {max(stock):.3f}." in text
    ahead = by_median(rows_of(RESULTS / "decode-h200-ahead.jsonl"))
    way = "sparse", "sparse"
    grown = [ahead[(*way, 261120, batch)] / ahead[(*way, 32768, batch)] - 1 for batch in (1, 8, 32)]
    assert "grows by {:.0%}, {:.0%} and {:.0%}".format(*grown) in text


def test_the_table_of_latent_keys_is_the_rows(bench: Any) -> None:
    found = by_size(bench, RESULTS / "decode-h100-latent.jsonl")
    stock = {
        batch: min(_first(found[name]["32768", batch]) for name in ("triton", "plugin, stock")) for batch in BATCHES
    }
    shown = documented_table("benchmarks", "| | batch 1 | batch 8 | batch 32 |")
    assert shown[0][1:] == [f"{stock[batch]:.2f}" for batch in BATCHES]
    for name, (_, *times) in zip(("plugin, shared", "sparse, anchors"), shown[1:], strict=True):
        for batch, text in zip(BATCHES, times, strict=True):
            ms, share = text.split(", ")
            assert float(ms) == _first(found[name]["32768", batch])
            assert float(share) == pytest.approx(float(ms) / stock[batch], abs=2e-3)


def test_the_table_of_the_readme_is_the_rows(bench: Any) -> None:
    found, older = by_size(bench, DEFAULT), by_size(bench, AFTER)
    table = (ROOT / "README.md").read_text().split("| requests | flashinfer |")[1].split("\n\n")[0]
    for batch, *times in cells(table)[2:]:
        dense, sparse = (found[name]["131072", batch] for name in ("flashinfer", "sparse, anchors"))
        exact, stock = (_first(older[name]["131072", batch]) for name in ("plugin, shared", "plugin, stock"))
        assert times == [dense, f"{exact:.2f}, {exact / stock:.3f}", sparse]


def test_the_sentence_about_other_lengths_is_the_rows(bench: Any) -> None:
    found = by_size(bench, DEFAULT)
    (ahead,) = by_size(bench, RESULTS / "decode-h200-ahead.jsonl").values()
    text = prose("benchmarks")
    for of, tokens, words in (
        (found["sparse, anchors"], "32768", "behind 32,768 ones {}, {} and {} ms"),
        (found["sparse, anchors"], "261120", "behind 261,120 {}, {} and {}."),
        (ahead, "131072", "`select_ahead` and 2,048 tokens (the default: 6,554) takes {}, {} and {} ms"),
    ):
        assert words.format(*(f"{_first(of[tokens, batch]):.2f}" for batch in BATCHES)) in text


def test_the_table_of_many_prefixes_is_the_rows(bench: Any) -> None:
    files = ("h200-distinct-prefixes", "h100-distinct-prefixes")
    shown = documented_table("benchmarks", "| GPU | prefixes x tokens | requests |")
    wanted = []
    for name in files:
        head, _, *rows = printed(bench, RESULTS / f"decode-{name}.jsonl")
        ahead = [number for number, title in enumerate(head) if "select_ahead" in title]
        usual = [number for number in range(3, len(head)) if number not in ahead]
        for row in rows:
            found = [row[1], row[2], *(row[number] for number in usual), *(row[number] for number in ahead)]
            wanted.append([name[:4].upper(), *found, *[""] * (5 - len(found))])
    assert shown == wanted


def _first(cell: str) -> float:
    return float(re.split("[ ,]", cell)[0])


def test_behind_the_longest_prefix_the_limits_are_met_over_three_starts(bench: Any) -> None:
    rows = bench.decode.engines.read([str(AFTER)])
    assert ({row["start"] for row in rows}, {row["steps"] for row in rows}) == ({0, 1, 2}, {99})
    found = by_size(bench, AFTER)
    limits = {"plugin, shared": {1: 1.02, 8: 0.50, 32: 0.20}, "sparse, kascade": {1: 0.66, 8: 0.33, 32: 0.14}}
    for name, of_size in limits.items():
        for batch, limit in of_size.items():
            ours, stock = (_first(found[of]["131072", str(batch)]) for of in (name, "plugin, stock"))
            assert ours / stock <= limit


def test_no_cell_of_the_grid_is_slower_by_more_than_two_percent() -> None:
    measured = [*rows_of(ALONE), *rows_of(GRID)]
    rows = {(row["engine"], row["prefixes"], row["context"], row["batch"]): row["ms"] for row in measured}
    found = {key[1:]: ms / rows[("flashinfer", *key[1:])] for key, ms in rows.items() if key[0] == "auto"}
    assert 2 * len(found) == len(rows) == 74
    assert f"more than {max(found.values()):.3f} of flashinfer" in prose("benchmarks")
    assert max(found.values()) <= 1.02


def test_the_documented_lengths_from_which_it_selects_are_the_rows() -> None:
    """A row of the grid that selects in more than the first steps of its requests."""
    selects: dict[tuple[int, int], list[int]] = {}
    for row in [*rows_of(ALONE), *rows_of(GRID)]:
        if row["engine"] == "auto" and row["sparse_steps"] > SETTLING:
            selects.setdefault((row["prefixes"], row["batch"]), []).append(row["context"])
    least = {key: f"{min(tokens):,}" for key, tokens in selects.items()}
    assert (least[1, 1], least[8, 8]) == (least[1, 8], least[8, 32])
    said = "behind one prefix from {} tokens on ({} with 32 requests), behind 8 from {} on, behind 32 from {} on"
    wanted = said.format(*(least[key] for key in ((1, 8), (1, 32), (8, 8), (32, 32))))
    assert wanted in prose("benchmarks")


def test_starts_become_a_median_and_a_range_and_a_share_of_the_best_rival(bench: Any) -> None:
    rows = [row("plugin", "shared", ms, start=n) for n, ms in enumerate((4.0, 2.0, 3.0))]
    rows += [row("flashinfer", "stock", 6.0), row("triton", "stock", 5.0)]
    assert bench.decode.table(rows).endswith("| 6.00 | 5.00 | 3.00 (2.00-4.00), 0.600 |")


def test_the_plot_has_a_line_for_each_batch_and_path_of_one_device(bench: Any, tmp_path: Path) -> None:
    rows, out = bench.decode.engines.read([str(ALONE)]), tmp_path / "decode.png"
    drawn = bench.decode.plotted(rows)
    names = ["flashinfer", "auto, anchors"]
    assert list(drawn) == [(batch, name) for batch in (1, 8, 32) for name in names]
    assert [context for context, _ in drawn[8, "flashinfer"]] == [1024 * 2**n for n in (0, 2, 3, 4, 5, 6, 7)]
    made = bench.decode.plot([*rows, {**rows[0], "path": "another", "ms": 7.0}], out)
    assert made.read_bytes().startswith(b"\x89PNG")
    assert made.stat().st_size < 60_000
    for wrong in ([], [row("flashinfer", "stock", 6.0), row("triton", "stock", 5.0, device="CPU")]):
        with pytest.raises(ValueError, match="expected rows of one device, shape and page size, got"):
            bench.decode.plot(wrong, out)


def test_flags_of_the_engines(bench: Any) -> None:
    def flags(engine: str, *argv: str, cpu: bool = False) -> dict[str, Any]:
        args = bench.decode.parse([*argv, "--contexts", "512", "1024", "--batches", "1", "8", "--tokens", "40"])
        args.cpu = cpu
        listed = bench.decode.engine_flags(args, engine, Path("model"), Path("store"))
        found = dict(zip(listed, [*listed[1:], ""], strict=True))
        return found | {"config": json.loads(found.get("--sparse-attn-config", "{}"))}

    stock, ours = flags("triton"), flags("plugin", "--config", '{"min_shared_tokens": 7}')
    assert (stock["--attention-backend"], "--sparse-attn" in stock) == ("triton", False)
    assert (ours["--attention-backend"], ours["--sparse-attn-store"]) == ("flashinfer", "store")
    assert ours["config"] == {"share_prefixes": True, "profile": "none", "min_shared_tokens": 7}
    for one in (stock, ours):
        assert (one["--cuda-graph-bs-decode"], one["--max-running-requests"]) == ("1", "8")
        assert int(one["--context-length"]) > 1024 + bench.decode.SUFFIX + 40
        assert "--disable-cuda-graph" not in one
    assert "--disable-cuda-graph" in flags("plugin", cpu=True)
    sparse = flags("sparse", "--plan", "kascade")["config"]
    assert (sparse["decode_path"], sparse["build"]) == ("sparse", "prefill")
    roles = [role["reuse"] if isinstance(role, dict) else role for role in sparse["layer_plan"]]
    assert roles[:4] == ["dense", "dense", "anchor", 2]
    assert ([n for n, role in enumerate(roles) if role == "anchor"], roles[31], len(roles)) == ([2, 8, 13, 14], 14, 32)
    assert flags("auto", "--plan", "anchors")["config"]["layer_plan"][:2] == ["dense", "anchor"]
    drafting = flags("lossless", "--config", '{"draft_tokens": 2}')
    assert (drafting["config"]["exactness"], drafting["config"]["decode_path"]) == ("verify", "auto")
    assert drafting["--max-running-requests"] == "24", "rows of drafts, too"


def test_which_drafts_are_kept_is_replayed(bench: Any) -> None:
    """Each row of a batch goes on where it was: one dropped draft ends a round."""
    replay = bench.lossless_replay.Replay("1101" * 977)
    assert [replay.counts([3, 0]) for _ in range(3)] == [[2, 0], [3, 0], [0, 0]]
    tokens, said = torch.tensor([5, 6, 7, 8, 20, 30, 31]), torch.full((7,), -9)
    for row in (0, 1, 2):
        replay._at[row] = 0
    found = replay.said(tokens, [3, 0, 1], said).tolist()
    assert found[:2] == [6, 7]
    assert found[2] not in (8, -9), "the third draft is dropped, and another token said"
    assert found[3:] == [-9, -9, 31, -9], "the tokens behind kept drafts are the model's own"
    half = bench.lossless_replay.Replay("0.5")
    kept = sum(count for _ in range(2000) for count in half.counts([1]))
    assert 850 < kept < 1150


def test_what_a_request_keeps_is_recorded_as_it_is_replayed(bench: Any) -> None:
    """Not of a request that ended, as rounds run ahead, nor drafts behind one that was dropped."""
    forwards_class = type("Recording", (SimpleNamespace,), {"verified": Forwards.verified})
    attachment_class = type("Recorded", (Attachment,), {})
    bench.lossless_replay.record(forwards_class, attachment_class)
    index = SimpleNamespace(entry=SimpleNamespace(digest="index"))
    one, idle, lost = (
        attachment_class("one", index=index),
        attachment_class("idle", index=index),
        attachment_class("lost"),
    )
    counters, rounds = SimpleNamespace(count_drafts=lambda *_: None), SimpleNamespace(lengths=DraftLengths(7))
    requests = {request.rid: request for request in (one, idle, lost)}
    forwards = forwards_class(requests=requests, counters=counters, rounds=rounds)
    for drafted, accepted in ((4, 4), (4, 1), (2, 0)):
        forwards.verified(["ended", "one", "idle", "lost"], [5, drafted, 0, 3], [5, accepted, 0, 2])
    told = one.told(1)
    assert (told["drafted"], told["accepted"], told["kept"]) == (10, 5, "1111100")
    assert [request.told(1)["kept"] for request in (idle, lost)] == ["", ""]
    again = bench.lossless_replay.Replay(told["kept"])
    assert [again.counts([drafted]) for drafted in (4, 4, 2)] == [[4], [1], [0]]
    counted: Any = counters
    forwards.verified(["one"], [3], [3])
    one.cut(2, counted)
    told = one.told(1)
    assert (told["drafted"], told["accepted"], told["kept"]) == (13, 6, "11111001"), "no draft behind the answer's end"


def test_drafts_are_kept_by_a_share_by_bits_or_as_recorded(bench: Any, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "answers.jsonl"
    rows: list[dict[str, Any]] = [{"config": "dense"}, {"config": "a: b", "kept": ["11", "", "10"]}]
    path.write_text("".join(json.dumps(one) + "\n" for one in (*rows, {"config": "a: b", "kept": ["0"]})))

    def acceptance(text: str) -> Any:
        return bench.decode.parse(["--acceptance", text]).acceptance

    assert [acceptance(text) for text in (".5", "1.0")] == [(".5", ".5"), ("1.0", "1.0")]
    assert acceptance("1101") == ("1101, 0.750", "1101")
    assert acceptance(f"{path}:a: b") == ("a: b, 0.600", "11100")
    for text, message in {
        "92%": "expected a share such as 0.92, bits such as 1101, or FILE:NAME, got '92%'",
        "1.5": "`answers.py --kept` writes such a file",
        f"{path}:dense": "that `answers.py --kept` measured (a: b), got",
        str(path): "that `answers.py --kept` measured (a: b), got",
    }.items():
        with pytest.raises(SystemExit):
            acceptance(text)
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["qwen", "qwen-16"])
def test_the_recorded_drafts_are_as_many_as_the_responses_counted(bench: Any, name: str) -> None:
    """Drafted ones that are missing were not judged."""
    rows = [one for one in rows_of(KEPT) if one["config"] == name]
    assert len(rows) == 6
    for one in rows:
        kept, (drafted, accepted) = "".join(one["kept"]), one["drafts"]
        assert (len(one["kept"]), kept.count("1")) == (len(one["scores"]), accepted)
        assert accepted <= len(kept) <= drafted
    found = bench.decode.acceptance_of(f"{KEPT}:{name}")
    assert found.kept == "".join("".join(one["kept"]) for one in rows)
    assert found.name.startswith(f"{name}, 0.9")


def test_with_random_weights_attention_differs_from_token_to_token(bench: Any) -> None:
    """And is the same in every process."""

    def made() -> torch.nn.ModuleDict:
        parts = {"q": torch.nn.Linear(512, 128), "k": torch.nn.Linear(512, 128), "norm": torch.nn.LayerNorm(512)}
        model = torch.nn.ModuleDict(parts)
        bench.random_weights.initialize(model)
        return model

    model, again = made(), made()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    with torch.no_grad():
        hidden = model["norm"](torch.randn(300, 512, generator=torch.Generator().manual_seed(0)))
        logits = model["q"](hidden[:50]) @ model["k"](hidden).T * 128**-0.5
    assert 0.8 < float(logits.std(dim=1).mean()) < 1.2
    assert not bool(model["q"].bias.any())


def test_rows_of_other_weights_are_no_starts_of_the_same_cell(bench: Any, tmp_path: Path) -> None:
    dummy, path = row("plugin", "shared", 3.0), tmp_path / "rows.jsonl"
    assert "3.00" in bench.decode.table([dummy])
    path.write_text("".join(json.dumps(one) + "\n" for one in (dummy, dummy | {"weights": "random"})))
    with pytest.raises(SystemExit, match=r"^decode.py: expected rows of one kind of weights, got"):
        bench.decode.main(["--table", str(path)])


def test_rows_of_other_settings_are_measured_beside_those_that_are_there(bench: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    args = bench.decode.parse(["--out", str(out), "--contexts", "1024", "--batches", "1", "8", "--tokens", "40"])
    origin = {**ORIGIN, "engine": "plugin"}
    out.write_text(json.dumps(row("plugin", "shared", 3.0)) + "\n")
    left = [(one["batch"], one["path"]) for one in bench.decode.missing(args, origin)]
    assert left == [(1, "shared"), (1, "stock"), (8, "stock")]
    for other in ({"config": {"min_shared_tokens": 7}}, {"flags": ["--x"]}, {"start": 1}, {"page": 64}):
        assert len(bench.decode.missing(args, origin | other)) == 4, other
    assert len(bench.decode.missing(args, {**origin, "engine": "flashinfer"})) == 2


def test_tokens_that_come_at_once_share_the_time_since_those_before(bench: Any, monkeypatch: Any) -> None:
    arrivals = [(2, 1.0), (3, 2.0), (6, 5.0), (6, 5.5), (8, 6.0)]
    for skipped, wanted in ((0, [1.0, 1.0, 1.0, 1.0, 0.25, 0.25]), (3, [1.0, 1.0, 0.25, 0.25])):
        monkeypatch.setattr(bench.decode, "SKIPPED", skipped)
        assert bench.decode.counted_steps(arrivals) == wanted


def test_tokens_of_requests_count_while_all_of_them_run(bench: Any, monkeypatch: Any) -> None:
    """From 2.0, when both have more than one token, to 6.0, when the first one ends: 4 and 8 tokens."""
    monkeypatch.setattr(bench.decode, "SKIPPED", 1)
    arrivals = [[(1, 0.0), (2, 1.0), (4, 2.5), (6, 6.0)], [(2, 2.0), (9, 5.0), (10, 6.0), (30, 9.0)]]
    found = bench.decode.tokens_together(arrivals)
    assert found == [2.0] * 2 + [0.5] * 8
    assert sum(found) / len(found) == pytest.approx(2 * 4.0 / 10)
    with pytest.raises(RuntimeError, match="raise --tokens"):
        bench.decode.tokens_together([[(2, 0.0), (6, 1.0)], [(2, 2.0), (9, 5.0)]])


def test_the_documented_times_of_lossless_decode_are_the_rows() -> None:
    lines = (line for line in document("lossless").splitlines() if line.startswith("| H"))
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    columns = [("flashinfer", "stock", None), ("plugin", "shared", None)]
    columns += [("lossless", "lossless", kept) for kept in ("qwen, 0.984", "0.986", "0.92", "0.85")]
    files = ("h100-lossless", "h200-lossless", "h200-lossless-qwen")
    for (name, *said), file in zip(table, files, strict=True):
        ms = {
            (row["engine"], row["path"], row.get("acceptance"), row["batch"]): row[
                "ms_mean" if row["engine"] == "lossless" else "ms"
            ]
            for row in rows_of(RESULTS / f"decode-{file}.jsonl")
            if row["context"] == 131072
        }
        times = [[ms.get((*of, batch)) for batch in (1, 8)] for of in columns]
        wanted = [", ".join(f"{one:.2f}" for one in pair) if all(pair) else "" for pair in times]
        assert (name[:4].lower(), said) == (file[:4], wanted)
    many = (f"{ms[of]:.2f}" for of in (("plugin", "shared", None, 32), ("lossless", "lossless", "0.92", 32)))
    assert "32 requests take {} ms in exact steps and {} with drafts at 92%".format(*many) in prose("docs/lossless")


def test_the_documented_times_of_a_cache_rank_are_the_rows() -> None:
    rows = rows_of(RESULTS / "decode-h200-cache-rank.jsonl")
    of = {(row["config"].get("cache_device"), row["prefixes"], row["batch"]): row for row in rows}
    cells = (1, 1), (1, 8), (1, 32), (8, 8)
    own, other = ([of[(device, *cell)] for cell in cells] for device in (None, "cuda:1"))
    wanted = [[f"{row['ms']:.2f}" for row in one] for one in (own, other)]
    wanted.append([f"{row['cache_rank']['answer_us']:.0f}" for row in other])
    table = documented_table("selection", "| | 131,072 tokens: batch 1")
    assert [line[1:] for line in table] == wanted
    assert all(0.96 < one["ms"] / two["ms"] < 1 for one, two in zip(other, own, strict=True))
