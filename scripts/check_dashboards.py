"""The dashboard and the alerts on a real Prometheus, beside a real server with load; and a picture of the main figures.

    python scripts/check_dashboards.py --bin FOLDER

FOLDER holds `prometheus` and `promtool`, of a release or of a system's package that was unpacked. Each expression of
the dashboard must give a result, each alert must be read and evaluated, and the one on damage must fire, as an index is
damaged meanwhile. Status 1 where one does not.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.demo import CPU_FLAGS, GPU_FLAGS, Progress, has_gpu, process, wait_until_ready
from scripts.needle.tasks import make_document
from scripts.servers import free_ports, post, server_state

ROOT = Path(__file__).resolve().parents[1]
DASHBOARDS = ROOT / "dashboards"
CONFIG: dict[str, Any] = {
    "build": "shared",
    "build_share": 1.0,
    "methods": {"token_index": {}},
    "layer_plan": ["anchor"] * 6,
    "min_top_k": 256,
    "share_prefixes": True,
    "min_shared_tokens": 512,
    "decode_path": "sparse",
    "index_gpu_bytes": 1_000_000,
    "store_min_free_bytes": 0,
}
#: Of the picture.
PANELS = (
    "Decoded tokens by path",
    "Time of a step by path",
    "Ended requests by path",
    "Why requests decoded dense",
    "Hits by tier",
    "Bytes of indexes",
)
UNITS = {"short": "a second"}
"""What the picture has for Grafana's words."""
DAMAGE = "SparseAttnIndexDamaged"
CLIENTS, TOKENS = 4, 48
SCRAPE_S, RATE = 1, "10s"


def panels() -> list[dict[str, Any]]:
    """Of the dashboard."""
    return json.loads((DASHBOARDS / "sglang-sparse-attn.json").read_text())["panels"]  # type: ignore[no-any-return]


def targets() -> Iterator[tuple[str, str, str]]:
    """(panel, expression, legend) of all that the dashboard asks."""
    for panel in panels():
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$instance", ".+").replace("$__rate_interval", RATE)
            yield panel["title"], expression, target["legendFormat"]


class Prometheus:
    """A running one.

    Args:
        url: where it listens.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **fields: Any) -> Any:
        """The data of an answer of its API."""
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(fields)}") as response:
            return json.load(response)["data"]

    def values(self, expression: str) -> list[float]:
        """Of all series, as of now."""
        return [float(one["value"][1]) for one in self.ask("query", query=expression)["result"]]

    def alerts(self) -> list[dict[str, Any]]:
        """All rules, once each has been evaluated."""
        deadline = time.monotonic() + 60
        while True:
            rules = [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]
            if all(rule["health"] != "unknown" for rule in rules) or time.monotonic() > deadline:
                return rules
            time.sleep(SCRAPE_S)


def configure(folder: Path, port: int) -> Path:
    """The committed configuration, for another port, and quicker."""
    text = (DASHBOARDS / "prometheus.yml").read_text().replace("localhost:30000", f"localhost:{port}")
    (folder / "alerts.yml").write_text((DASHBOARDS / "alerts.yml").read_text())
    (folder / "prometheus.yml").write_text(re.sub(r"interval: \d+s", f"interval: {SCRAPE_S}s", text))
    return folder / "prometheus.yml"


def put_load(url: str, store: Path, seconds: float) -> None:
    """Clients that ask about one document after another; some opt out, some ask something short. In the middle an index
    that no server holds is damaged, and asked for.
    """
    begun = time.monotonic()
    documents = [
        make_document("many_keys", seed=60 + n, num_tokens=2048, num_questions=64) for n in range(6)
    ]  # of which the device has room for two

    def client(number: int) -> None:
        asked = 0
        while (part := (time.monotonic() - begun) / seconds) < 1:
            document = documents[int(part * 2 * len(documents)) % len(documents)]
            asked += 1
            text = "a short one" if asked % 16 == 0 else f"{document.text} {document.questions[asked % 64].text}"
            sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
            if asked % 8 == number:
                sampling["custom_params"] = {"sparse_attn": False}
            post(url, "/generate", {"text": text, "sampling_params": sampling})

    def damage() -> None:
        time.sleep(0.45 * seconds)  # before the first document, whose index has left the device, is asked again
        oldest = min(store.rglob("*.pfxindex"), key=lambda path: path.stat().st_mtime)
        raw = bytearray(oldest.read_bytes())
        raw[len(raw) // 2] ^= 0xFF
        oldest.write_bytes(raw)

    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        for done in [pool.submit(damage), *(pool.submit(client, number) for number in range(CLIENTS))]:
            done.result()


def draw(prometheus: Prometheus, begun: float, path: Path) -> None:
    """The main panels since `begun` (seconds since the epoch)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 7), layout="constrained")
    axes = dict(zip(PANELS, figure.subplots(2, 3).flat, strict=True))
    for panel, expression, legend in targets():
        if panel not in axes:
            continue
        found = prometheus.ask("query_range", query=expression, start=begun, end=time.time(), step=SCRAPE_S)["result"]
        for one in found:
            label = re.sub(r"\{\{(\w+)\}\}", lambda match, of=one: of["metric"][match[1]], legend)
            points = [(float(at) - begun, float(value)) for at, value in one["values"]]
            if any(value > 0 for _, value in points):
                axes[panel].plot(*zip(*points, strict=True), label=re.sub(r", localhost:\d+", "", label))
    units = {panel["title"]: panel["fieldConfig"]["defaults"]["unit"] for panel in panels() if panel["type"] != "row"}
    for panel, axis in axes.items():
        axis.set(title=panel, xlabel="s", ylabel=UNITS.get(units[panel], units[panel]), ylim=(0, None))
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=80)


def check(prometheus: Prometheus) -> bool:
    """Print what each expression and each alert gives; whether all are as they should be."""
    good = True
    for target in prometheus.ask("targets")["activeTargets"]:
        good &= target["health"] == "up"
        print(f"{target['scrapeUrl']}: {target['health']} {target['lastError']}")
    for panel, expression, _ in targets():
        values = prometheus.values(expression)
        good &= bool(values)
        print(f"{'ok' if values else 'EMPTY':6}{panel:40}{len(values)} series, {', '.join(f'{v:.4g}' for v in values)}")
    for alert in prometheus.alerts():
        names = set(re.findall(r"sglang:\w+", alert["query"]))
        fine = alert["health"] == "ok" and all(prometheus.values(f"count({name})") for name in names)
        fine &= alert["name"] != DAMAGE or alert["state"] == "firing"
        good &= fine
        print(f"{'ok' if fine else 'BAD':6}{alert['name']:40}{alert['state']} {alert.get('lastError', '')}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bin", type=Path, required=True, help="folder of prometheus and promtool")
    parser.add_argument("--seconds", type=float, default=120.0, help="of load")
    parser.add_argument("--picture", type=Path, help="write a picture of the main figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (store := work / "store").mkdir()
        port, nccl, own = free_ports(3)
        subprocess.run([args.bin / "promtool", "check", "config", configure(work, port)], check=True)
        subprocess.run([args.bin / "promtool", "test", "rules", DASHBOARDS / "alerts-test.yml"], check=True)
        flags = GPU_FLAGS if has_gpu() else [*CPU_FLAGS, "--max-total-tokens", "32768", "--max-running-requests", "8"]
        serve = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(ROOT / "models" / "needle")]
        serve += ["--port", str(port), "--nccl-port", str(nccl), "--context-length", "8192", "--enable-metrics", *flags]
        serve += ["--sparse-attn", "--sparse-attn-store", str(store), "--sparse-attn-config", json.dumps(CONFIG)]
        watch = [str(args.bin / "prometheus"), f"--config.file={work / 'prometheus.yml'}"]
        watch += [f"--storage.tsdb.path={work / 'data'}", f"--web.listen-address=localhost:{own}"]
        prometheus = Prometheus(f"http://localhost:{own}")
        with process(serve, work / "server.log") as server, process(watch, work / "prometheus.log"):
            wait_until_ready(server, f"http://localhost:{port}", work / "server.log", Progress())
            begun = time.time()
            put_load(f"http://localhost:{port}", store, args.seconds)
            good = check(prometheus)
            print(json.dumps(server_state(f"http://localhost:{port}")["metrics"]))
            if args.picture is not None:
                draw(prometheus, begun, args.picture)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
