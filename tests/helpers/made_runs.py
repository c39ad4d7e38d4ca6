"""Run folders as a training writes them, made in milliseconds: with a crash, a resume, a spike, a rewind and
stragglers."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from txl_dist.config.load import Config, config_to_toml

TOKENS_PER_STEP = 2048
START_S = 1_790_000_000.0
HOSTILE = "</pre><script>document.title = 'struck'; fetch('http://192.0.2.1/x')</script><img src=http://192.0.2.1/y>"

Record = dict[str, Any]


class Clock:
    """Seconds since 1970 that never decrease."""

    def __init__(self) -> None:
        self.now_s = START_S

    def after(self, seconds: float) -> float:
        self.now_s += seconds
        return self.now_s


def make_run(folder: Path, *, seed: int = 1, num_ranks: int = 4, max_steps: int = 2000, lr: float = 2e-3) -> Path:
    """Write the folder of a run of `max_steps` steps that crashed at 45 %, was rewound at 70 %, and is done. Return the
    folder."""
    folder.mkdir(parents=True)
    values = {"run": {"dir": f"runs/{folder.name}"}, "optim": {"lr": lr}, "train": {"max_steps": max_steps}}
    values["model"] = {"cutoffs": [512, 2048], "num_layers": 4, "pre_norm": True}
    config = Config.model_validate_json(json.dumps(values))
    (folder / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
    (folder / "log.txt").write_text("12:00:00 I started\n", encoding="utf-8")
    (folder / "DONE").write_text(f"{max_steps}\n", encoding="utf-8")
    write_state(folder, step=max_steps)
    scores: dict[str, dict[str, Any]]
    scores = {f"memory {length}": {"loss": 2.3 - length / 2000, "ppl": 9.5, "tokens": 123456.0, "memory_len": length}
              for length in (0, 64, 128)}  # fmt: skip
    for name, nats in (("memory 0", 0.3), ("memory 128", 0.0)):
        scores[name] |= {"by_cluster": parts(2.0, None, 4.0 + nats, size=512),
                         "by_position": parts(*(3.0 + nats - 0.1 * place for place in range(8)), size=8)}  # fmt: skip
    scores["order 0"] = {"loss": 4.5, "ppl": 90.0, "tokens": 123456.0}
    (folder / "evaluation.json").write_text(json.dumps(scores), encoding="utf-8")
    lines = [json.dumps(record) for record in records(seed=seed, num_ranks=num_ranks, max_steps=max_steps, lr=lr)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def parts(*losses: float | None, size: int) -> list[dict[str, float | None]]:
    """Return losses of clusters or positions, all of one size, in the form of `txl evaluate`."""
    return [
        {"first": size * index, "last": size * (index + 1) - 1, "loss": loss, "tokens": 9}
        for index, loss in enumerate(losses)
    ]


def write_state(folder: Path, *, step: int, tokenizer: str = "aa11") -> None:
    checkpoint = folder / "checkpoints" / f"step_{step:09d}"
    checkpoint.mkdir(parents=True)
    state = {"code_version": "0.1.0", "step": step, "zero_stage": 1, "precision": "fp32", "world_size": 4}
    state |= {"parameters": {"embedding": [4096, 128], "bias": [128]}, "tokenizer_fingerprint": tokenizer}
    (checkpoint / "state.json").write_text(json.dumps(state), encoding="utf-8")


def records(*, seed: int, num_ranks: int, max_steps: int, lr: float) -> Iterator[Record]:
    """Yield the records of metrics.jsonl in the order of the file."""
    clock, chance = Clock(), random.Random(seed)
    crash, resumed, spike, rewound = (int(max_steps * share) for share in (0.45, 0.4, 0.7, 0.6))
    stretches = [(0, crash), (resumed, spike), (rewound, max_steps)]
    for number, (first, last) in enumerate(stretches):
        if number == 2:
            yield {"kind": "event", "event": "spike", "step": spike, "what": "loss", "value": 9.1, "median": 2.2,
                   "sigmas": 14.2, "time_s": clock.after(1)}  # fmt: skip
            yield {"kind": "event", "event": "rewound", "step": first, "from": spike, "time_s": clock.after(1)}
        else:
            yield {"kind": "event", "event": "start", "step": first, "ranks": num_ranks, "threads_per_rank": 1,
                   "hosts": 2, "device": "x86_64", "torch": "2.13.0", "txl_dist": "0.1.0", "commit": "c0ffee123456",
                   "command": ["txl", "train", "a b.toml"], "corpora": ["stdlib", "code"], "tokenizer": "subword",
                   "vocab_size": 4096, "token": "token", "no_bits": {}, "held_out_bytes": 320986,
                   "time_s": clock.after(3600 * number)}  # fmt: skip
        for step in range(first + 10, last + 1, 10):
            yield train_record(step, clock, chance, num_ranks=num_ranks, max_steps=max_steps, lr=lr, seed=seed)
            yield from _occasional(step, clock, chance, max_steps=max_steps, seed=seed)
    yield {"kind": "event", "event": "done", "step": max_steps, "time_s": clock.after(1)}


def loss_at(step: int, *, seed: int = 1) -> float:
    return 2.0 + 0.05 * seed + 6.2 * math.exp(-step / 150) + 0.8 / (1 + step / 500)


def train_record(
    step: int, clock: Clock, chance: random.Random, *, num_ranks: int, max_steps: int, lr: float, seed: int = 1
) -> Record:
    loss = loss_at(step, seed=seed) + chance.gauss(0, 0.04)
    times = [40 + chance.gauss(0, 1) + (6 if rank == 2 % num_ranks else 0) for rank in range(num_ranks)]
    slowest = times.index(max(times))
    step_ms, median = max(times) + 2, sorted(times)[num_ranks // 2]
    return {
        "kind": "train", "step": step, "loss": loss, "ppl": math.exp(loss), "bits_per_byte": loss / 2.6,
        "bits_per_character": loss / 2.58, "lr": lr * min(step / 100, 0.5 + 0.5 * math.cos(math.pi * step / max_steps)),
        "grad_norm": 0.6 + chance.expovariate(8), "clipped_pct": 100 * math.exp(-step / 400),
        "tokens_per_s": 1000 * TOKENS_PER_STEP / step_ms, "step_ms": step_ms,
        "data_wait_pct": chance.expovariate(2), "peak_gib": 1.2 + 0.1 * (step > 100),
        "mfu_pct": 38 + chance.gauss(0, 1),
        "tokens_seen": step * TOKENS_PER_STEP, "skipped_steps": 0, "skipped_documents": 0, "epoch": step / max_steps,
        **({"save_s": 0.1 + (step * 37 % 100) / 500} if step % (max_steps // 10) == 0 else {}),
        "eta_s": (max_steps - step) * step_ms / 1000, "rank_ms": times, "slowest_rank": slowest,
        "slowest_host": f"node-{'ab'[slowest // 2 % 2]}", "slowest_pct": 100 * (max(times) / median - 1),
        "time_s": clock.after(step_ms / 100),
    }  # fmt: skip


def _occasional(step: int, clock: Clock, chance: random.Random, *, max_steps: int, seed: int) -> Iterator[Record]:
    loss = loss_at(step, seed=seed)
    if step % (max_steps // 10) == 0:
        yield {"kind": "event", "event": "saved", "step": step, "path": f"step_{step:09d}", "gib": 0.02,
               "seconds": 0.1 + chance.random() / 5, "time_s": clock.after(0.2)}  # fmt: skip
        for kind, offset in (("eval", 0.05), ("eval_code", 0.4)):
            bits = {"bits_per_byte": (loss + offset) / 2.6, "bits_per_character": (loss + offset) / 2.58}
            clusters = {f"loss_cluster_{number}": loss - 0.6 + 1.1 * number for number in range(3)}
            yield {"kind": kind, "step": step, "loss": loss + offset, "ppl": math.exp(loss + offset), "tokens": 123456,
                   "seconds": 3.0, **bits, **clusters, "time_s": clock.after(3)}  # fmt: skip
        with_memory = [loss + 0.02 * math.exp(-place / 4) for place in range(32)]
        without = [loss + 0.1 + 0.9 * math.exp(-place / 6) for place in range(32)]
        yield {"kind": "memory", "step": step, "seconds": 0.4, "tokens": 4096, "memory_gain": 0.28 - 40 / (step + 200),
               **{f"memory_norm_{layer}": 0.5 + 0.2 * layer + step / 5000 for layer in range(4)},
               **{f"memory_attention_pct_{layer}": 20 + 10 * layer + 20 * step / max_steps for layer in range(4)},
               "loss_by_position": with_memory, "loss_by_position_without_memory": without,
               "time_s": clock.after(0.4)}  # fmt: skip
        yield {"kind": "sample", "step": step, "prompt": "def read_lines(path):",
               "text": f"\n    # step {step}\n    return open(path).readlines()\n" + HOSTILE * (step == max_steps),
               "time_s": clock.after(0.5)}  # fmt: skip
    if step == max_steps // 4:
        yield {"kind": "event", "event": "skipped", "step": step, "loss": None, "time_s": clock.after(0)}
        yield {"kind": "event", "event": "straggler", "step": step, "rank": 2, "host": "node-b", "pct": 17.5,
               "time_s": clock.after(0)}  # fmt: skip
