"""Measure how fast a server answers, with vLLM's figures, for `txl serve` or any server of OpenAI's completions.

    python -m tools.benchmarks.serve bundles/first                           one at a time, 64 at once, a conversation
    python -m tools.benchmarks.serve http://HOST:8000 --request-rate 20 --num-prompts 200 --goodput ttft:200 tpot:50

For a bundle, a run or a checkpoint the program starts a server on one thread and ends it after the measurement. Prompts
are random ids with a fixed seed. Requests are sent at once (`--request-rate inf`) or as a Poisson process, and at most
`--max-concurrency` requests run at the same time. Each request asks for a stream with usage. The file of `--json` has
the keys of `vllm bench serve`:

    ttft   time from a request to its first token           tpot   (e2el - ttft) / (tokens - 1)
    itl    time between two pieces of a text                e2el   time from a request to its end
    request_throughput, output_throughput, total_token_throughput: rates per second
    request_goodput: requests per second that meet all limits of --goodput, which are in ms

Without --request-rate and --max-concurrency the program measures three things: the requests one after another, the
requests 64 at a time with the ratio of the throughputs, and ten turns of a conversation. Each turn continues from the
memory of the turn before it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

METRICS = ("ttft", "tpot", "itl", "e2el")
NUM_AT_ONCE = 64
NUM_TURNS = 10


@dataclass
class Output:
    """Result of a request. Times are in seconds. `memory` is the id of the kept memory."""

    prompt_len: int = 0
    output_len: int = 0
    ttft: float = 0.0
    e2el: float = 0.0
    itl: list[float] = field(default_factory=list)
    error: str = ""
    memory: str = ""

    @property
    def tpot(self) -> float:
        """Seconds per token after the first token."""
        return (self.e2el - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Output:
    """Send one request as a stream and return its result."""
    output, began = Output(), time.perf_counter()
    last = began
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            output.error = (await response.text())[:300]
            return output
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event, now = json.loads(line[6:]), time.perf_counter()
            if "error" in event:
                output.error = event["error"]["message"]
            for choice in event.get("choices", ()):
                output.memory = choice.get("memory", {}).get("id", "")
                if output.ttft:
                    output.itl.append(now - last)
                else:
                    output.ttft = now - began
                last = now
            if usage := event.get("usage"):
                output.prompt_len, output.output_len = usage["prompt_tokens"], usage["completion_tokens"]
    output.e2el = last - began
    return output


async def run(url: str, bodies: list[dict[str, Any]], *, rate: float, at_once: int, seed: int) -> dict[str, Any]:
    """Send all requests. Return their results and the seconds of the whole run."""
    arrivals, outputs, places = random.Random(seed), [], asyncio.Semaphore(at_once)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def one(body: dict[str, Any]) -> Output:
            async with places:
                return await ask(session, url, body)

        await ask(session, url, bodies[0])
        began = time.perf_counter()
        tasks: list[asyncio.Task[Output]] = []
        for body in bodies:
            if math.isfinite(rate) and tasks:
                await asyncio.sleep(arrivals.expovariate(rate))
            tasks.append(asyncio.create_task(one(body)))
        outputs = await asyncio.gather(*tasks)
        return {"outputs": outputs, "duration": time.perf_counter() - began}


def summary(outputs: list[Output], *, duration: float, limits: dict[str, float]) -> dict[str, Any]:
    """Return the figures of `vllm bench serve`. `limits` are those of --goodput in milliseconds."""
    done = [output for output in outputs if not output.error]
    num_in, num_out = sum(output.prompt_len for output in done), sum(output.output_len for output in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outputs) - len(done),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(done) / duration,
        "request_goodput": None,
        "output_throughput": num_out / duration,
        "total_token_throughput": (num_in + num_out) / duration,
    }
    if limits:
        good = [one for one in done if all(getattr(one, name) * 1000 <= most for name, most in limits.items())]
        result["request_goodput"] = len(good) / duration
    seconds = {
        "ttft": [one.ttft for one in done],
        "tpot": [one.tpot for one in done if one.output_len > 1],
        "itl": [second for one in done for second in one.itl],
        "e2el": [one.e2el for one in done],
    }
    for name in METRICS:
        ms = np.array(seconds[name] or [0.0]) * 1000
        result |= {f"mean_{name}_ms": float(ms.mean()), f"median_{name}_ms": float(np.median(ms))}
        result |= {f"std_{name}_ms": float(ms.std()), f"p99_{name}_ms": float(np.percentile(ms, 99))}
    return result


async def converse(url: str, *, turn: list[int], output_len: int, rounds: int) -> list[float]:
    """Return the median milliseconds of each turn over `rounds` conversations. Every turn begins with the memory of the
    turn before it."""
    times: list[list[float]] = [[] for _ in range(NUM_TURNS)]
    async with aiohttp.ClientSession() as session:
        for number in range(rounds + 1):
            memory = ""
            for index in range(NUM_TURNS):
                body = {"prompt": turn, "max_tokens": output_len, "keep_memory": True, "memory": memory, "seed": index}
                output = await ask(session, url, body)
                if output.error:
                    raise SystemExit(output.error)
                memory = output.memory
                if number:  # the first conversation warms up
                    times[index].append(output.e2el / max(1, output.output_len) * output_len * 1000)
    return [statistics.median(one) for one in times]


@contextlib.contextmanager
def server(source: str, *, precision: str) -> Iterator[tuple[str, psutil.Process | None]]:
    """Yield the address of the given server, or start a server and yield its address and process."""
    if source.startswith("http"):
        yield source.rstrip("/"), None
        return
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "txl_dist",
            "serve",
            source,
            "--port",
            "0",
            "--max-tokens",
            "100000",
            "--precision",
            precision,
        ],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"is served at (http://\S+);", line):
                yield found[1], psutil.Process(process.pid)
                break
        else:
            raise SystemExit(f"{source} could not be served")
    finally:
        process.terminate()
        process.wait()


def cpu_s(process: psutil.Process | None) -> float:
    """Return the CPU seconds of the server. They depend less on other load on the machine than elapsed time does."""
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def bodies_of(arguments: argparse.Namespace, *, vocab_size: int) -> list[dict[str, Any]]:
    """Return the bodies of the requests."""
    draw = random.Random(arguments.seed)
    return [
        {
            "prompt": [draw.randrange(vocab_size) for _ in range(arguments.input_len)],
            "max_tokens": arguments.output_len,
            "seed": index,
        }
        for index in range(arguments.num_prompts)
    ]


async def facts_of(url: str) -> dict[str, Any]:
    """Return the entry of the served model from /v1/models."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        facts: dict[str, Any] = (await response.json())["data"][0]
        return facts


def main() -> None:
    """Measure, print the figures and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a bundle, a run, a checkpoint, or the address of a server")
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--input-len", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=64, help="largest number of tokens of a text")
    parser.add_argument("--request-rate", type=float, default=None, help="requests per second; inf sends all at once")
    parser.add_argument("--max-concurrency", type=int, default=None, help="largest number of requests at the same time")
    parser.add_argument("--goodput", nargs="*", default=[], metavar="METRIC:MS", help="for instance ttft:200 tpot:50")
    parser.add_argument("--precision", default="stored", help="flag --precision of the server that is started")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5, help="conversations, and runs of each case")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    limits = {name: float(most) for name, _, most in (one.partition(":") for one in arguments.goodput)}
    if unknown := limits.keys() - set(METRICS) | {name for name in limits if name == "itl"}:
        parser.error(f"--goodput: {', '.join(sorted(unknown))} must be ttft, tpot or e2el")
    with server(arguments.source, precision=arguments.precision) as (url, process):
        facts = asyncio.run(facts_of(url))
        bodies = bodies_of(arguments, vocab_size=facts.get("vocab_size", 256))

        def measure(rate: float, at_once: int) -> dict[str, Any]:
            before = cpu_s(process)
            found = asyncio.run(run(url, bodies, rate=rate, at_once=at_once, seed=arguments.seed))
            spent_s = cpu_s(process) - before
            told = summary(found["outputs"], duration=found["duration"], limits=limits)
            head = {"date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"), "model_id": facts["id"]}
            head |= {"backend": "openai", "num_prompts": len(bodies), "max_concurrency": at_once}
            told["server_cpu_ms_per_token"] = spent_s * 1000 / max(1, told["total_output_tokens"]) if process else None
            return {**head, "request_rate": rate if math.isfinite(rate) else "inf", **told}

        if arguments.request_rate is not None or arguments.max_concurrency is not None:
            rate = math.inf if arguments.request_rate is None else arguments.request_rate
            result = measure(rate, arguments.max_concurrency or len(bodies))
            show(result)
        else:
            pairs = [(measure(math.inf, 1), measure(math.inf, NUM_AT_ONCE)) for _ in range(arguments.rounds)]
            ordered = [sorted(runs, key=lambda one: one["output_throughput"]) for runs in zip(*pairs, strict=True)]
            alone, together = (runs[len(pairs) // 2] for runs in ordered)
            slow, fast = (runs[-1] for runs in ordered)
            by_median = together["output_throughput"] / alone["output_throughput"]
            by_best = fast["output_throughput"] / slow["output_throughput"]
            turns = asyncio.run(
                converse(url, turn=bodies[0]["prompt"], output_len=arguments.output_len, rounds=arguments.rounds)
            )
            print("one at a time, median of the rounds")
            show(alone)
            print(f"\n{NUM_AT_ONCE} at a time, median of the rounds")
            show(together)
            print(f"\noutput_throughput, x one at a time: {by_median:.1f} by the median, {by_best:.1f} by the best")
            if process:
                cpu = [statistics.median(one["server_cpu_ms_per_token"] for one in runs) for runs in ordered]
                ratio = (
                    cpu[0] / cpu[1] if cpu[1] else math.nan
                )  # the system counts in hundredths of a second, so the time can be 0
                print(f"processor time of the server, ms per token: {cpu[0]:.2f} and {cpu[1]:.2f}, {ratio:.1f} x")
            print("ms per turn of a conversation:", " ".join(f"{ms:.0f}" for ms in turns))
            result = {**together, "one_at_a_time": alone, "x_by_median": by_median, "x_by_best": by_best}
            result["turns_ms"] = turns
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def show(result: dict[str, Any]) -> None:
    """Print the figures in the form of vLLM."""
    for name in ("completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "request_throughput"):
        print(
            f"  {name:<24} {result[name]:,.2f}" if isinstance(result[name], float) else f"  {name:<24} {result[name]:,}"
        )
    if result["request_goodput"] is not None:
        print(f"  {'request_goodput':<24} {result['request_goodput']:,.2f}")
    for name in ("output_throughput", "total_token_throughput"):
        print(f"  {name:<24} {result[name]:,.2f}")
    for name in METRICS:
        kinds = " ".join(f"{kind} {result[f'{kind}_{name}_ms']:9,.2f}" for kind in ("mean", "median", "std", "p99"))
        print(f"  {name + ' (ms)':<24} {kinds}")


if __name__ == "__main__":
    main()
