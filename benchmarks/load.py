"""What merging gives the users of a server: requests a second at the same p99, in open loop.

    python benchmarks/load.py CHECKPOINT PHOTOS --recipe segmenter_vit_s16_camvid --runtime torch -o load.json

The dense network, the merging one by thresholds, and one by a budget (`--budget`, which should merge as much) are
exported with labels out and served, each by `algm-deploy serve` as it comes, on 127.0.0.1. The client sends photos, the
largest square of each as JPEG, all of them in turn, and takes label maps as PNG. Requests are due at random times
(Poisson) that do not wait for answers; a latency counts from the due time, so a server that falls behind shows it. For
each limit the rate is found by bisection of its logarithm: the highest at which 99 of 100 requests were answered within
it. Networks take turns, with the same arrivals; all servers stay up, and one network has load at a time.

What limits the rate stands beside each try: the share of the time in which a server's network ran, and the cores that
servers and client took. Where one process of a server is the limit and not the network, `--processes` serves each
network by several on the same device; the client sends to them in turn, from `--clients` processes of its own.

Servers warm up as they do for everybody, for at most `--warm-up` seconds; the record says how long that took and how
many CUDA graphs it captured, and of each try how many were captured meanwhile. Before anything counts, every network
has also had load at `--warm-rates` rates between those that are looked between: on a GPU a batch of a size or a count
of tokens that was neither warmed up nor met costs several times what it costs from then on. `--warm-rates 0` shows a
server as it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from trained import new_record, write

from algm_deploy.bundle.store import Bundle
from algm_deploy.pictures.sources import find_images
from algm_deploy.report.tables import text_table

NETWORKS = ("dense", "thresholds", "budgets")
CONNECTIONS = 64  # to a server: as many as its queue takes
PATIENCE = 60  # seconds for an answer; a server that takes longer has none
SOON = 0.3  # seconds in which all processes of the client have their photos and wait for the same moment
COMMAND = (sys.executable, "-m", "algm_deploy")


def main() -> None:
    options = flags().parse_args()
    paths = find_images(options.photos)[: options.count]
    record = new_record(
        options.checkpoint.resolve().name,
        runtime=options.runtime,
        precision=options.precision,
        budget=options.budget,
        photos=len(paths),
        processes=options.processes,
        clients=options.clients,
        batch=options.batch,
        wait_ms=options.wait_ms,
        limits_ms=options.limits_ms,
        requests=options.requests,
        rates=options.rates,
        warm_up_s=options.warm_up,
        warm_rates=options.warm_rates,
    )
    networks = [name for name in NETWORKS if name != "budgets" or options.budget]
    with ExitStack() as stack:
        scratch = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with ThreadPoolExecutor() as threads:
            folders = list(threads.map(lambda name: exported(name, options, scratch), networks))
        photos = [square_jpeg(path, Bundle.open(folders[0]).recipe.network.image_size[0]) for path in paths]
        starting = [[started(folder, options, stack) for _ in range(options.processes)] for folder in folders]
        client = stack.enter_context(Client(photos, options.clients))
        servers = {name: Servers(processes) for name, processes in zip(networks, starting, strict=True)}
        record["runs"] = {name: {"warm_up": one.warm_up(), "tries": []} for name, one in servers.items()}
        with turn(options.turn, options.runs):
            for name, one in servers.items():
                for rate in np.geomspace(*options.rates, options.warm_rates):
                    print("warm", name, client.load(one, float(rate), options.requests, 0), flush=True)
            for repeat in range(options.repeats):
                for limit in options.limits_ms:
                    bisect(client, servers, limit, repeat, options, record)
                    write(record, options.output)
        for name, one in servers.items():
            record["runs"][name]["token_share"] = one.token_share()
    write(record, options.output)
    print(table(record))


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--recipe")
    parser.add_argument("--runtime", default="torch")
    parser.add_argument("--device", help="such as cpu; default: the runtime's usual one")
    parser.add_argument("--precision", choices=("fp16", "fp32", "bf16", "int8"), default="fp16")
    parser.add_argument("--calibrate", type=Path, help="photos that int8 measures ranges on, none of PHOTOS")
    parser.add_argument("--budget", help="CLAP,GBM as shares: serve that network too")
    parser.add_argument("--count", type=int, default=64, help="photos")
    parser.add_argument("--limits-ms", type=float, nargs="+", default=[50], help="of 99 in 100 latencies")
    parser.add_argument("--requests", type=int, default=500, help="of one try of a rate")
    parser.add_argument("--rates", type=float, nargs=2, default=(50, 2000), help="requests a second to look between")
    parser.add_argument("--within", type=float, default=0.05, help="how close the rates found are to the next tried")
    parser.add_argument("--warm-up", type=int, default=20, help="--warm-up of `serve`: seconds at most, 0 for none")
    parser.add_argument("--warm-rates", type=int, default=5, help="rates of the load before anything counts")
    parser.add_argument("--repeats", type=int, default=1, help="bisections, with other arrivals")
    parser.add_argument("--processes", type=int, default=1, help="of `serve`, for each network")
    parser.add_argument("--clients", type=int, default=1, help="processes of the client")
    parser.add_argument("--batch", type=int, default=8, help="most windows that a network takes at once")
    parser.add_argument("--wait-ms", type=int, default=2, help="--wait of `serve`")
    parser.add_argument("--work", type=Path, help="folder of bundles; those that are there are served again")
    parser.add_argument("--turn", type=Path, help="new file that several runs share: they prepare side by side")
    parser.add_argument("--runs", type=int, default=1, help="how many share it; then they have load in turn")
    parser.add_argument("-o", "--output", type=Path, default=Path("load.json"))
    return parser


@contextmanager
def turn(lock: Path | None, runs: int) -> Iterator[None]:
    """Of several runs that prepare side by side, one has load at a time, and none before all are ready."""
    if lock is None:
        yield
        return
    with lock.open("a+") as file:
        file.write("ready\n")
        file.flush()
        while len(lock.read_text().split()) < runs:
            time.sleep(0.1)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def square_jpeg(path: Path, side: int) -> bytes:
    """The largest square in the middle of a photo, `side` pixels wide."""
    with Image.open(path) as photo:
        cut = min(photo.size)
        left, top = (photo.width - cut) // 2, (photo.height - cut) // 2
        square = photo.convert("RGB").crop((left, top, left + cut, top + cut)).resize((side, side))
    stream = BytesIO()
    square.save(stream, "JPEG", quality=90)
    return stream.getvalue()


# ------------------------------------------------------------------------------------------------------------ servers


def exported(name: str, options: argparse.Namespace, scratch: Path) -> Path:
    """The bundle of a network, labels out, and built where its runtime builds."""
    folder = scratch / f"{name}-{options.precision}-{options.batch}"
    if folder.exists():
        return folder
    words = ["export", str(options.checkpoint), "-o", str(folder), "--labels", "--precision", options.precision, "-q"]
    words += ["--max-batch", str(options.batch)]
    words += ["--recipe", options.recipe] if options.recipe else []
    words += ["--calibrate", str(options.calibrate)] if options.calibrate else []
    words += {"dense": ["--dense"], "thresholds": [], "budgets": ["--budget", options.budget]}[name]
    subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command
    if options.runtime != "torch":
        build = [*COMMAND, "build", str(folder), "--runtime", options.runtime, "-q"]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - likewise
    return folder


def started(folder: Path, options: argparse.Namespace, stack: ExitStack) -> subprocess.Popen[str]:
    """A server that was started; it ends with the stack."""
    words = ["serve", str(folder), "--port", "0", "--runtime", options.runtime, "-q"]
    words += ["--wait", str(options.wait_ms), "--warm-up", str(options.warm_up)]
    words += ["--device", options.device] if options.device else []
    server = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True)  # noqa: S603 - likewise
    return stack.enter_context(ending(server))


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def address_of(process: subprocess.Popen[str]) -> int:
    """The port of a server, once it listens."""
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a server ended before it listened")
    return int(line.rpartition(":")[2])


class Servers:
    """The processes that serve one network, once they listen."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self.ports = [address_of(process) for process in processes]
        self._pids = [process.pid for process in processes]

    def used(self) -> dict[str, float]:
        """What they count, and `cpu`: the seconds of processors that they took."""
        found: defaultdict[str, float] = defaultdict(float)
        for port, pid in zip(self.ports, self._pids, strict=True):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
                lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#"]
            for name, value in lines:
                found[name] += float(value)
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            found["cpu"] += sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
        return found

    def warm_up(self) -> dict[str, float]:
        """What was done before they listened: seconds of one server, and graphs of all. To be asked before any load."""
        found = self.used()
        seconds = found["algm_warm_up_seconds"] / len(self.ports)
        return {"seconds": round(seconds, 2), "cuda_graphs": int(found["algm_cuda_graphs"])}

    def token_share(self) -> dict[str, float]:
        """Tokens left of the patches, by merge."""
        found = self.used()
        return {
            re.findall('merge="(.+?)"', name)[0]: round(value / found["algm_patches_total"], 4)
            for name, value in found.items()
            if name.startswith("algm_tokens_total{")
        }


# ------------------------------------------------------------------------------------------------------------- client


class Part(NamedTuple):
    """What a process of the client saw: when its requests were due, latencies from there in seconds, infinite where a
    request failed; how late it began with each by its own fault, and the seconds of a processor that it took."""

    latencies: NDArray[np.float64]
    late: NDArray[np.float64]
    seconds: float
    cpu: float


class Client:
    """Sends photos from several processes."""

    def __init__(self, photos: Sequence[bytes], processes: int) -> None:
        self._processes = processes
        self._pool = ProcessPoolExecutor(processes, get_context("spawn"), _keep, (photos,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def load(self, servers: Servers, rate: float, requests: int, seed: int) -> dict[str, Any]:
        """Requests at random times, `rate` a second on average."""
        share = -(-requests // self._processes)
        before, begin = servers.used(), time.perf_counter() + SOON
        asked = [
            self._pool.submit(_part, servers.ports, CONNECTIONS // self._processes, rate / self._processes, share, *way)
            for way in ((seed * self._processes + number, begin) for number in range(self._processes))
        ]
        parts = [one.result() for one in asked]
        used = {name: value - before.get(name, 0) for name, value in servers.used().items()}
        seconds = max(part.seconds for part in parts)
        latencies = np.sort(np.concatenate([part.latencies for part in parts]))
        late = np.sort(np.concatenate([part.late for part in parts]))
        answered, batches = int(np.isfinite(latencies).sum()), used["algm_batch_windows_count"]
        return {
            "rate": rate,
            "requests": len(latencies),
            "failures": len(latencies) - answered,
            "answered_per_s": round(answered / seconds, 1),
            "latency_ms_p50_p90_p99": [_ms(latencies, share) for share in (0.5, 0.9, 0.99)],
            "network_share": round(used["algm_batch_seconds_sum"] / seconds / len(servers.ports), 3),
            "windows_per_batch": round(used["algm_batch_windows_sum"] / batches, 2),
            "batch_ms": round(1000 * used["algm_batch_seconds_sum"] / batches, 2),
            "captures": int(used["algm_cuda_graphs"]),
            "cores_of_servers": round(used["cpu"] / seconds, 2),
            "cores_of_client": round(sum(part.cpu for part in parts) / seconds, 2),
            "client_late_ms_p99": _ms(late, 0.99),
        }


def _ms(ordered: NDArray[np.float64], share: float) -> float | str:
    """A quantile in milliseconds; JSON has no infinity."""
    value = float(1000 * ordered[math.ceil(len(ordered) * share) - 1])
    return round(value, 2) if value < math.inf else "inf"


_photos: list[bytes] = []  # of a process of the client


def _keep(photos: Sequence[bytes]) -> None:
    _photos[:] = photos


def _part(ports: Sequence[int], connections: int, rate: float, requests: int, seed: int, begin: float) -> Part:
    return asyncio.run(_sent(ports, connections, rate, requests, seed, begin))


async def _sent(ports: Sequence[int], connections: int, rate: float, requests: int, seed: int, begin: float) -> Part:
    """One process's requests from the moment `begin` on, by the clock that all processes have, to servers in turn."""
    arrivals = random.Random(seed)  # noqa: S311 - a schedule, no secret
    due = begin + np.cumsum([arrivals.expovariate(rate) if rate < math.inf else 0 for _ in range(requests)])
    pools: list[asyncio.LifoQueue[Any]] = [asyncio.LifoQueue() for _ in ports]
    for pool in pools:
        for _ in range(connections):
            pool.put_nowait(None)  # opened when it is needed
    latencies, late = np.full(requests, np.inf), np.zeros(requests)

    async def one(number: int) -> None:
        await asyncio.sleep(max(0.0, due[number] - time.perf_counter()))
        late[number] = time.perf_counter() - due[number]
        pool = pools[number % len(ports)]
        connection = await pool.get()
        try:
            async with asyncio.timeout(PATIENCE):
                if connection is None or connection[0].at_eof():  # the server closes those that were idle for long
                    connection = await asyncio.open_connection("127.0.0.1", ports[number % len(ports)])
                status = await ask(*connection, _photos[(seed + number) % len(_photos)])
            if status == 200:
                latencies[number] = time.perf_counter() - due[number]
        except (OSError, EOFError):
            connection = None
        pool.put_nowait(connection)

    cpu = time.process_time()
    await asyncio.gather(*(one(number) for number in range(requests)))
    part = Part(latencies, late, time.perf_counter() - begin, time.process_time() - cpu)
    for pool in pools:
        while not pool.empty():
            if connection := pool.get_nowait():
                connection[1].close()
    return part


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> int:
    """One request on a connection that stays open; its status."""
    writer.write(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    await reader.readexactly(int(length[1]) if length else 0)
    return int(head[9:12])


# ------------------------------------------------------------------------------------------------------------ search


def bisect(
    client: Client,
    servers: dict[str, Servers],
    limit: float,
    repeat: int,
    options: argparse.Namespace,
    record: dict[str, Any],
) -> None:
    """Tries rates, networks in turns, until the highest that keeps the limit is known; None where none kept it.

    What was tried for one limit in this repeat tells of the others as well.
    """
    runs = record["runs"]
    for step in range(100):
        rates = {name: next_rate(tried(run, repeat), limit, options) for name, run in runs.items()}
        for name, rate in rates.items():
            if rate is not None:
                found = client.load(servers[name], rate, options.requests, 1000 * repeat + step + 1)
                runs[name]["tries"].append({"repeat": repeat, **found})
                print(name, found, flush=True)
        if not any(rates.values()):
            break
    for run in runs.values():
        best = max((one["rate"] for one in tried(run, repeat) if kept(one, limit)), default=None)
        run.setdefault("requests_per_s_within_limit", {}).setdefault(f"{limit:g}", []).append(best)


def tried(run: dict[str, Any], repeat: int) -> list[dict[str, Any]]:
    return [one for one in run["tries"] if one["repeat"] == repeat]


def kept(one: dict[str, Any], limit: float) -> bool:
    p99 = one["latency_ms_p50_p90_p99"][2]
    return p99 != "inf" and p99 <= limit


def next_rate(tries: Sequence[dict[str, Any]], limit: float, options: argparse.Namespace) -> float | None:
    """Between the highest rate that kept the limit and the next that did not; None where they are close."""
    low = max((one["rate"] for one in tries if kept(one, limit)), default=options.rates[0])
    high = min((one["rate"] for one in tries if one["rate"] > low and not kept(one, limit)), default=options.rates[1])
    return float(f"{math.sqrt(low * high):.3g}") if high > low * (1 + options.within) else None


def table(record: dict[str, Any]) -> str:
    """Rates side by side, and what the best try of each took."""
    rows = []
    for limit in record["limits_ms"]:
        rates = {name: run["requests_per_s_within_limit"][f"{limit:g}"] for name, run in record["runs"].items()}
        known = {name: float(np.median(found)) for name, found in rates.items() if None not in found}
        for name, run in record["runs"].items():
            best = next((one for one in run["tries"] if one["rate"] in rates[name] and kept(one, limit)), None)
            told = ("network_share", "windows_per_batch", "batch_ms", "cores_of_servers", "cores_of_client")
            rows.append(
                (
                    f"{limit:g}",
                    name,
                    ", ".join("none that was tried" if rate is None else str(rate) for rate in rates[name]),
                    f"{known[name] / known['dense']:.2f}" if {name, "dense"} <= known.keys() else "-",
                    *(str(best[one]) if best else "-" for one in told),
                    " ".join(map(str, run["token_share"].values())),
                )
            )
    shares = ("network's share of time", "windows a batch", "ms a batch", "servers' cores", "client's cores")
    return text_table(("p99 <= ms", "", "requests/s", "to dense", *shares, "tokens left"), rows)


if __name__ == "__main__":
    main()
