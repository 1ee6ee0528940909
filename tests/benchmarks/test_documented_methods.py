"""docs/selection.md, kernels.md and offload.md say what the committed rows do."""

from __future__ import annotations

from statistics import fmean, geometric_mean
from typing import Any

from tests.benchmarks.results import RESULTS, document, documented_table, prose, rows_of


def green_rows(name: str, gpu: str = "h100") -> list[dict[str, Any]]:
    """Of kernels."""
    rows = rows_of(RESULTS / f"kernels-{gpu}-{name}.jsonl")
    assert all(row["green"] for row in rows)
    return rows


def times(rows: list[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], str]:
    """Microseconds as documents show them, by these values of a row."""
    return {tuple(row[name] for name in names): f"{row['us']:,.1f}" for row in rows}


def test_the_documented_errors_of_a_samples_sums() -> None:
    errors: dict[int, list[float]] = {1: [], 16: []}
    for row in rows_of(RESULTS / "selection-sums-cpu.jsonl.xz"):
        if (row["source"], row["num_tokens"]) == ("planted", 131_072) and row["sum_step"] in errors:
            errors[row["sum_step"]].append(row["points"]["0.05"]["error"])
    assert f"{fmean(errors[16]):.3f} with 16 and {fmean(errors[1]):.3f} with all tokens" in prose("selection")


def test_the_documented_overlaps_of_predicted_queries() -> None:
    def means(name: str) -> dict[tuple[str, float, str], tuple[float, float]]:
        """(overlap, error) by (model, share kept, selection): over tasks, of each over its answers."""
        found: dict[tuple[str, float, str], dict[str, list[dict[str, float]]]] = {}
        for row in rows_of(RESULTS / f"query-prediction-{name}.jsonl.xz"):
            tasks = found.setdefault((row["model"], row["kept"], row["selection"]), {})
            tasks.setdefault(row["task"], []).append(row)

        def mean(tasks: dict[str, list[dict[str, float]]], figure: str) -> float:
            return fmean(fmean(row[figure] for row in of) for of in tasks.values())

        return {key: (mean(tasks, "overlap"), mean(tasks, "error")) for key, tasks in found.items()}

    of_cpu, of_h100 = means("cpu"), means("h100")
    columns = list(dict.fromkeys(key[:2] for key in of_cpu))
    for bold, *said in documented_table("selection", "| selected by | Qwen, 1/8 |"):
        cells = [of_cpu[(*column, bold.strip("*"))] for column in columns]
        assert said == [f"{overlap:.1%}, {error:.3f}" for overlap, error in cells], bold
    old = [of_cpu[(*column, "lag 16")][0] for column in columns if column[1] == 1 / 8]
    assert "Queries 16 steps old overlap by {:.1%} and {:.1%} at 1/8".format(*old) in prose("selection")
    longer = [of_h100[key][0] for name in ("lagged tokens x 4", "last") for key in of_h100 if key[2] == name]
    assert "overlap of {:.1%} and {:.1%}, the last query's {:.1%} and {:.1%}".format(*longer) in prose("selection")


def test_the_documented_times_of_selection_on_an_h100() -> None:
    rows = [*green_rows("selection-before"), *green_rows("selection")]
    us = times(rows, "commit", "context", "batch")
    figures = [us[commit, 131_072, batch] for commit in ("3cc28f9", "cd0e17a") for batch in (1, 8, 32)]
    said = "{}, {} and {} us on an H100 (commit 3cc28f9; before, cd0e17a: {}, {} and {})"
    assert said.format(*figures) in prose("kernels")
    moved = [row["gate"]["log_prob"] for row in rows]
    assert f"by {min(moved):.3f} to {max(moved):.3f} nats" in document("kernels")


def test_the_documented_times_of_the_methods() -> None:
    def by_cell(gpu: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        rows = green_rows("methods", gpu)
        return {(row["case"], f"{row['context']:,}", row["batch"], row["groups"]): row for row in rows}

    found, older = by_cell("h200"), by_cell("h100")
    shown = documented_table("kernels", "| method | index, of KV |")
    sizes = ((1, 1), (8, 1), (32, 1), (16, 16))
    for name, share, *times, torch in shown:
        own = [found[(name.strip("`"), tokens, *size)] for tokens in ("131,072", "8,192") for size in sizes]
        assert times == [f"{row['us']:,.1f}" for row in own]
        kernel, reference = (older[name.strip("`") + of, "131,072", 1, 1]["us"] for of in ("", "_torch"))
        assert (share, torch) == (f"{own[0]['config']['of_kv_bytes']:.2%}", f"{reference / kernel:.1f}")
    assert {case for case, *_ in found} == {*(name.strip("`") for name, *_ in shown), "ab_sparse_minmax64"}
    wrong = max(row["gate"]["wrong_share"] for row in found.values())
    assert f"At most {wrong:.2%} of a list" in document("kernels")


def test_the_documented_times_of_a_layers_operators() -> None:
    rows = [row for row in green_rows("operators") if row["budget"] in (None, 2048)]
    us = times(rows, "case", "context", "batch", "groups")
    cases = "flashinfer", "token_index", "two_level", "two_level_ahead", "two_level_behind"
    sizes = [(131072, 1, 1), (131072, 8, 1), (131072, 8, 8), (32768, 1, 1), (32768, 8, 8)]
    shown = documented_table("kernels", "| | 131,072 tokens: batch 1 |")
    assert [own for _, *own in shown] == [[us[(case, *size)] for size in sizes] for case in cases]
    us = times(green_rows("operators-2048", "h200"), "case", "context", "batch", "groups")
    sizes = [(131072, 1, 1), (131072, 8, 1), (131072, 32, 1), (131072, 8, 8)]
    sizes += [(tokens, batch, batch) for tokens in (65536, 32768) for batch in (1, 8)]
    shown = documented_table("kernels", "| H200 | 131,072 tokens: batch 1 |")
    assert [own for _, *own in shown] == [[us.get((case, *size), "") for size in sizes] for case in (*cases, "quest")]


def test_the_documented_times_of_operators_beside_a_control() -> None:
    rows = [
        row for row in green_rows("operators", "h200") if (row["bench"], row["case"]) != ("attention", "flashinfer")
    ]
    us = {(row["case"], row["context"], row["batch"]): row["us"] for row in rows}
    cases = ["flashinfer", "sparse", "token_index", "two_level", "two_level_ahead", "two_level_behind"]
    cases += ["two_level_tokens_ahead", "quest"]
    sizes = (131072, 1), (131072, 8), (131072, 32), (32768, 8)
    shown = documented_table("kernels", "| a layer of 31, us |")
    wanted = [[f"{us[(case, *size)]:,.1f}" if (case, *size) in us else "" for size in sizes] for case in cases]
    assert [own for _, *own in shown] == wanted
    alone = {size: us[("sparse", *size)] for size in sizes}
    waits = [(us[("two_level_behind", *size)] - own) / (us[("two_level", *size)] - own) for size, own in alone.items()]
    assert f"{min(waits):.0%} to {max(waits):.0%} of what `two_level` adds" in prose("selection")


def test_the_documented_times_of_latent_keys() -> None:
    rows = [row for row in green_rows("latent") if row["context"] == 131072]
    us = times(rows, "bench", "case", "batch", "groups")
    cases = ("attention", "sglang_triton"), ("attention", "exact"), ("operators", "token_index")
    sizes = (1, 1), (8, 1), (32, 1), (8, 8)
    shown = documented_table("kernels", "| | batch 1 | batch 8 | batch 32 | 8 prefixes |")
    assert [own for _, *own in shown] == [[us.get((*case, *size), "") for size in sizes] for case in cases]
    blocks = [us[("operators", "two_level", *size)] for size in sizes[:2]]
    assert "spill: {} to {} us".format(*blocks) in document("kernels")


def test_the_documented_search_of_launch_parameters() -> None:
    us: dict[tuple[int, ...], dict[str, float]] = {}
    for row in green_rows("launch"):
        key = (row["shape"][2], row["case"], row["context"], row["batch"], row["groups"])
        us.setdefault(key, {})[row["tuned"]] = row["us"]
    gains = []
    for dim in (128, 64):
        ratios = [one["hopper.json"] / one["tuned.json"] for key, one in us.items() if key[0] == dim]
        assert len(ratios) == 25
        gains.append(1 - geometric_mean(ratios))
    assert "on an H100 a search gains {:.0%}, with heads of 64 {:.0%}".format(*gains) in prose("kernels")


def test_the_documented_figures_behind_host_memory() -> None:
    rows = rows_of(RESULTS / "offload-serving-h100.jsonl")
    found = {(row["measure"], row["engine"], row["answer"], row["sizes"]["residents"]): row for row in rows}
    text, few, many = prose("offload"), 22528, 73728
    for answer in (128, 512):
        ours, stock = (found["throughput", engine, answer, few] for engine in ("ours", "stock"))
        assert (ours["failed"], ours["dense_rows"], stock["failed"]) == (0, 0, 0)
        assert f"| {ours['tokens_per_s']:.0f} | {stock['tokens_per_s']:.0f}" in text
    held = sum(size for name, size in ours["bytes"].items() if name != "indexes_at_most")
    figures = [f"{found['distinct', name, None, many]['tokens_per_s']:.0f}" for name in ("ours", "hbm")]
    host, hbm = (found["step", engine, None, few] for engine in ("host", "hbm"))
    first = [found["first_token", engine, None, few]["seconds"] for engine in ("host", "disk", "prefill")]
    h200 = rows_of(RESULTS / "offload-serving-h200.jsonl")
    later = {(row["measure"], row["engine"]): row.get("ms", row.get("seconds")) for row in h200}
    ways: dict[str, list[dict[str, Any]]] = {"exact": [], "selects": [], "stock": []}
    for row in h200:
        if row["measure"] == "throughput" and row["sizes"]["residents"] == few:
            assert (row["failed"], row["dense_rows"]) == (0, 0)
            ways["selects" if row["config"] else "exact" if row["engine"] == "ours" else "stock"].append(row)
    shown = [[of[n]["tokens_per_s"] for of in ways.values()] for n in (0, 1)]
    shown.append([of[0]["ttft_ms"] / 1e3 for of in ways.values()])
    of_each = [
        row["tokens_per_s"]
        for row in h200
        if row["measure"] == "distinct" and (row["engine"] == "hbm" or row["sizes"]["residents"] == many)
    ]
    errors: dict[tuple[str, int, str], float] = {}
    alone: list[list[float]] = []
    for row in rows_of(RESULTS / "offload-cpu-churn.jsonl.xz"):
        if row["bench"] == "lagged":
            errors[row["document"], row["budget"], row["way"]] = fmean(row["error"])
        elif (row["document"], row["requests"], row["budget"], row["unit"]) == ("prose-8192", 1, 2048, 1):
            alone.append(row["churn"])
    churn = {fmean(of): layer for layer, of in enumerate(zip(*alone, strict=True))}
    least, most = min(churn), max(churn)
    late = [
        100 * (error / errors[document, budget, "exact"] - 1)
        for (document, budget, way), error in errors.items()
        if way.startswith("lagged")
    ]
    for said in (
        f"in {held / 1e9:.1f} GB of device memory",
        f"HiCache, {stock['pool_bytes'] / 1e9:.1f} GB",
        "a request on each, 73,728 tokens resident | {} | {}: one".format(*figures),
        f"{host['link_ms']:.1f} ms of it at 51 GB/s",
        f"| {host['ms']:.1f} | {hbm['ms']:.1f}: selected in device memory",
        f"| {first[0]:.2f}; from a file in tmpfs {first[1]:.1f} | {first[2]:.0f}, writing its file |",
        "the step takes {:.1f} ms, {:.1f} in".format(*(later["step", engine] for engine in ("host", "hbm"))),
        "first token {:.2f} s, {:.1f} from that machine's disk, {:.0f} without".format(
            *(later["first_token", one] for one in ("host", "disk", "prefill"))
        ),
        "answers of 128 | {:.0f} | {:.0f} | {:.0f} |".format(*shown[0]),
        "| of 512 | {:.0f} | {:,.0f} | {:.0f} |".format(*shown[1]),
        "first token, median s | {:.1f} | {:.1f} | {:.1f} |".format(*shown[2]),
        "73,728 tokens resident: {1:.0f} tokens/s; one, in device memory: {0:.0f}".format(*of_each),
        f"adds {min(late):.0f} to {max(late):.0f}% to attention's error",
        f"{fmean(churn):.0%} of what a layer selects is new at a step, "
        f"{least:.0%} in layer {churn[least]} to {most:.0%} in layer {churn[most]} ",
    ):
        assert said in text, said
