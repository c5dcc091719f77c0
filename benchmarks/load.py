"""What merging gives the users of a server: requests a second at the same p99, in open loop.

    python benchmarks/load.py CHECKPOINT PHOTOS --recipe segmenter_vit_s16_camvid --runtime torch -o load.json

The dense network, the merging one by thresholds, and one by a budget (`--budget`, which should merge as much) are
exported with labels out and served, each by `algm-deploy serve` as it comes, on 127.0.0.1. The client sends photos, the
largest square of each as JPEG, all of them in turn, and takes label maps as PNG. Requests are due at random times
(Poisson) that do not wait for answers; a latency counts from the due time, so a server that falls behind shows it. The
rate is found by bisection of its logarithm: the highest at which 99 of 100 requests were answered within the limit.
Networks take turns in every round, with the same seed; all servers stay up, and one has load at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import math
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from trained import new_record, write

from algm_deploy.bundle.store import Bundle
from algm_deploy.pictures.sources import find_images
from algm_deploy.report.tables import text_table

NETWORKS = ("dense", "thresholds", "budgets")
CONNECTIONS = 64  # of the client: as many as a server's queue takes
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
        limit_ms=options.limit_ms,
    )
    networks = [name for name in NETWORKS if name != "budgets" or options.budget]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack, ThreadPoolExecutor() as threads:
        folders = list(threads.map(lambda name: exported(name, options, Path(scratch)), networks))
        side = Bundle.open(folders[0]).recipe.network.image_size[0]
        photos = [square_jpeg(path, side) for path in paths]
        starting = [started(folder, options, stack) for folder in folders]
        servers = dict(zip(networks, map(address_of, starting), strict=True))
        record["runs"] = {name: {"tries": []} for name in servers}
        with turn(options.turn, options.runs):
            for port in servers.values():
                asyncio.run(load(port, photos, math.inf, len(photos), 0))  # every photo has been seen
            bisect(servers, photos, options, record["runs"])
        for name, port in servers.items():
            record["runs"][name] |= counted(port)
    write(record, options.output)
    print(table(record))


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--recipe")
    parser.add_argument("--runtime", default="torch")
    parser.add_argument("--device", help="such as cpu; default: the runtime's usual one")
    parser.add_argument("--precision", choices=("fp16", "fp32"), default="fp16")
    parser.add_argument("--budget", help="CLAP,GBM as shares: serve that network too")
    parser.add_argument("--count", type=int, default=64, help="photos")
    parser.add_argument("--limit-ms", type=float, default=50, help="of 99 in 100 latencies")
    parser.add_argument("--requests", type=int, default=500, help="of one try of a rate")
    parser.add_argument("--rounds", type=int, default=6, help="of the bisection")
    parser.add_argument("--rates", type=float, nargs=2, default=(50, 2000), help="requests a second to look between")
    parser.add_argument("--repeats", type=int, default=1, help="bisections, with other arrivals")
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
    folder = scratch / name
    words = ["export", str(options.checkpoint), "-o", str(folder), "--labels", "--precision", options.precision, "-q"]
    words += ["--recipe", options.recipe] if options.recipe else []
    words += {"dense": ["--dense"], "thresholds": [], "budgets": ["--budget", options.budget]}[name]
    subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command
    if options.runtime != "torch":
        build = [*COMMAND, "build", str(folder), "--runtime", options.runtime, "-q"]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - likewise
    return folder


def started(folder: Path, options: argparse.Namespace, stack: ExitStack) -> subprocess.Popen[str]:
    """A server that was started; it ends with the stack."""
    words = ["serve", str(folder), "--port", "0", "--runtime", options.runtime, "-q"]
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


def counted(port: int) -> dict[str, Any]:
    """What a server says of itself: tokens left of the patches, and windows in a batch."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in lines}
    patches = values["algm_patches_total"]
    tokens = {
        re.findall('merge="(.+?)"', name)[0]: round(value / patches, 4)
        for name, value in values.items()
        if name.startswith("algm_tokens_total{")
    }
    return {
        "token_share": tokens,
        "windows_per_batch": values["algm_batch_windows_sum"] / values["algm_batch_windows_count"],
    }


# ------------------------------------------------------------------------------------------------------------- client


async def load(port: int, photos: Sequence[bytes], rate: float, requests: int, seed: int) -> dict[str, Any]:
    """Sends requests at random times, `rate` a second on average; latencies in milliseconds from the due times."""
    arrivals = random.Random(seed)  # noqa: S311 - a schedule, no secret
    due = np.cumsum([arrivals.expovariate(rate) if rate < math.inf else 0 for _ in range(requests)])
    pool: asyncio.LifoQueue[Any] = asyncio.LifoQueue()
    for _ in range(CONNECTIONS):
        pool.put_nowait(None)  # opened when it is needed
    latencies, failures = [], 0
    begun = time.perf_counter()

    async def one(number: int) -> None:
        nonlocal failures
        await asyncio.sleep(max(0.0, due[number] - (time.perf_counter() - begun)))
        connection = await pool.get()
        try:
            connection = connection or await asyncio.open_connection("127.0.0.1", port)
            status = await ask(*connection, photos[number % len(photos)])
        except OSError:
            connection, status = None, 0
        pool.put_nowait(connection)
        if status == 200:
            latencies.append(1000 * (time.perf_counter() - begun - due[number]))
        else:
            failures += 1

    await asyncio.gather(*(one(number) for number in range(requests)))
    seconds = time.perf_counter() - begun
    while not pool.empty():
        if connection := pool.get_nowait():
            connection[1].close()
    ordered = np.sort([*latencies, *[math.inf] * failures])
    p50, p90, p99 = (float(ordered[math.ceil(requests * share) - 1]) for share in (0.5, 0.9, 0.99))
    return {
        "rate": rate,
        "requests": requests,
        "failures": failures,
        "answered_per_s": round(len(latencies) / seconds, 1),
        "latency_ms_p50_p90_p99": [round(one, 2) if one < math.inf else "inf" for one in (p50, p90, p99)],
    }


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> int:
    """One request on a connection that stays open; its status."""
    writer.write(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    await reader.readexactly(int(length[1]) if length else 0)
    return int(head[9:12])


def bisect(servers: dict[str, int], photos: Sequence[bytes], options: argparse.Namespace, runs: dict[str, Any]) -> None:
    """Tries rates until the highest that keeps the limit is known to within the last step; None where none kept it."""
    for repeat in range(options.repeats):
        between = {name: list(map(math.log, options.rates)) for name in servers}
        for turn in range(options.rounds):
            for name, port in servers.items():
                low, high = between[name]
                rate = round(math.exp((low + high) / 2), 1)
                found = asyncio.run(load(port, photos, rate, options.requests, 100 * repeat + turn))
                p99 = found["latency_ms_p50_p90_p99"][2]
                kept = p99 != "inf" and p99 <= options.limit_ms
                between[name][0 if kept else 1] = math.log(rate)
                runs[name]["tries"].append({**found, "kept": kept})
                print(name, found, flush=True)
        for name in servers:
            tried = runs[name]["tries"][-options.rounds :]
            best = max((one["rate"] for one in tried if one["kept"]), default=None)
            runs[name].setdefault("requests_per_s_within_limit", []).append(best)


def table(record: dict[str, Any]) -> str:
    """Rates side by side."""
    rates = {name: run["requests_per_s_within_limit"] for name, run in record["runs"].items()}
    known = {name: np.median(found) for name, found in rates.items() if None not in found}
    rows = []
    for name, run in record["runs"].items():
        rows.append(
            (
                name,
                ", ".join("none that was tried" if rate is None else str(rate) for rate in rates[name]),
                f"{known[name] / known['dense']:.2f}" if {name, "dense"} <= known.keys() else "-",
                f"{run['windows_per_batch']:.1f}",
                " ".join(map(str, run["token_share"].values())),
            )
        )
    title = f"requests/s at p99 <= {record['limit_ms']:g} ms"
    return text_table(("", title, "to dense", "windows a batch", "tokens left"), rows)


if __name__ == "__main__":
    main()
