"""Damage every kind of JSON, TOML and lock file that the package reads, and check the reaction of its readers.

    python -m tools.checks.fuzz --cases 10000 --seed 0            table of counts; exit code 1 after a traceback or hang
    python -m tools.checks.fuzz --reader "run lock" --case 17     one case again, with its traceback
    python -m tools.checks.fuzz --reader settings --cases 20      the smallest size: one reader, some seconds

A case changes a valid file in one to four places and passes it to its reader. A change of the structure removes or
renames a member, or replaces it by another type, an absurd size, a deep nesting or a hostile name. A change of the
bytes cuts the file, flips bits, or inserts NUL or invalid UTF-8. In some cases the file is replaced by nothing, a
folder, a FIFO, a device or a link to itself. If a file contains hashes of itself or of other files, the hashes are
computed again in two of three cases, so that the damage reaches the code after the check of the hashes.

    refused        the reader raised a TxlError with a message (exit code 2 for a user)
    accepted       the file was read and used
    passed over    the reader ignored the damaged file, as it should
    tracebacks     the reader raised any other exception
    hangs          the reader took more than LIMIT_S seconds

Files that need a GPU are not covered. Pickles are not covered either, because they have their own tests.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tools.benchmarks.measuring import announced
from txl_dist.config.load import Config, check_config, load_config
from txl_dist.config.schema import ModelSection
from txl_dist.console.logging import logger
from txl_dist.convert.importer import import_model
from txl_dist.convert.vocabulary import read_vocabulary
from txl_dist.data.loader.corpus import open_corpus
from txl_dist.data.prepare.documents import Reading, TextBlock, documents_of
from txl_dist.data.prepare.merge import ShardTask, is_written, read_written
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.data.prepare.tokenize import read_part_info
from txl_dist.data.prepare.workdir import claim_scratch
from txl_dist.data.verify.verify import verify_corpus
from txl_dist.distributed.connection import Connection
from txl_dist.distributed.processes import process_id
from txl_dist.errors import TxlError
from txl_dist.inference.bundle import Package, load_bundle, network_of, write_bundle
from txl_dist.inference.language_model import LanguageModel
from txl_dist.inference.probe import probe_of
from txl_dist.io.files import canonical_hash
from txl_dist.io.manifest import MANIFEST, describe_file, files_of, problems_of, write_manifest
from txl_dist.report.compare import write_comparison
from txl_dist.report.inspect_run import checkpoint_facts, checkpoint_lines
from txl_dist.report.report import write_report
from txl_dist.report.summary import facts_of, lead, read_run
from txl_dist.tokenizers.importing import open_tokenizer
from txl_dist.tokenizers.tokenizer import build_tokenizer, load_tokenizer
from txl_dist.train.checkpoint.memories import load_lane_memory
from txl_dist.train.checkpoint.read import consolidated_weights, newest_checkpoint
from txl_dist.train.monitoring.heartbeats import Beat, _beat
from txl_dist.train.monitoring.preemption import PreemptionRequests
from txl_dist.train.monitoring.run_lock import RunLock
from txl_dist.train.run_dir import read_run_history

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
LIMIT_S = 20.0
MAX_MEMORY_BYTES = 6 << 30
"""Limit of the process's address space. A reader that needs more raises MemoryError, which counts as a traceback."""
_NUM_WORDS = 1000
SIZES = (0, 1, -1, 2, 255, 10**6, 2**31, 10**9, 10**12, 2**63 - 1, 2**63, 10**18, 10**30, -(2**63) - 1)
FLOATS = (0.5, -0.5, 1e308, 1e-320, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", " ", "a", "\0", "../../etc/passwd", "/dev/zero", "..", ".", "x" * 70_000, "\x1b[31m\x9b2J\u202e", "\ud800",
         "nan", "1e999", "true", "\n", "%s%n", "{}", "-1", "9" * 5000, "\uffff", "a/b", "train\0")  # fmt: skip
MEMBERS = ("self_sha256", "format_version", "name", "kind", "__class__", "", "\0")


class HangError(BaseException):
    """Raised by the alarm when a reader takes more than LIMIT_S seconds."""


class Outcome(NamedTuple):
    """Reaction of a reader to a case: the kind of reaction, and the message or the traceback."""

    kind: str
    details: str = ""


class Reader(NamedTuple):
    """A kind of file to damage, and the function that reads it."""

    make: Callable[[Path], object]
    """Writes a folder with valid files."""
    files: tuple[str, ...]
    """Glob patterns of the files in the folder that are damaged."""
    read: Callable[[Path], bool]
    """Reads the folder. Returns True if the files were accepted and False if they were passed over. Raises TxlError if
    they were refused."""
    sign: Callable[[Path], object] = lambda folder: None
    """Computes the hashes in the folder again."""
    in_place: bool = True
    """Whether a file may be replaced by a folder, a FIFO, a device or a link."""


# ---------------------------------------------------------------------------------------------------- damage


def mutated(value: Any, chance: random.Random) -> Any:
    """Return a copy of a structure with one random change."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places or chance.random() < 0.03:
        return _other(value, chance)
    # Of a long list only some entries are candidates.
    holder, key = chance.choice(places if len(places) < 200 else chance.sample(places, 200))
    action = chance.randrange(8)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[chance.choice(MEMBERS)] = holder.pop(key)
    elif action == 2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(chance.choice(holder)))
    elif action == 3 and isinstance(holder, dict):
        holder[chance.choice(TEXTS)] = copy.deepcopy(holder[key])
    elif action == 4:
        other_holder, other = chance.choice(places)
        holder[key], other_holder[other] = other_holder[other], holder[key]
    else:
        holder[key] = _other(holder[key], chance)
    return value


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list) and depth < 12:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key], depth + 1)


def _other(value: Any, chance: random.Random) -> Any:
    kind = chance.randrange(8)
    if kind == 0 and isinstance(value, int | float) and not isinstance(value, bool):
        return value + chance.choice((-1, 1, 0.5, 2**40))
    if kind == 1 and isinstance(value, str) and value:
        at = chance.randrange(len(value))
        return value[:at] + chance.choice(TEXTS) + value[at + 1 :]
    if kind == 2:
        nested: Any = value
        for _ in range(chance.choice((1, 3, 70, 300))):
            nested = [nested] if chance.random() < 0.5 else {"a": nested}
        return nested
    choices: list[Any] = [None, True, False, [], {}, [value], {"a": value}, [[0, 1], [2]]]
    return chance.choice([*choices, *SIZES, *FLOATS, *TEXTS])


def damaged_bytes(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one random change that ignores the structure."""
    at = chance.randrange(len(data) + 1)
    kind = chance.randrange(10)
    if kind == 0:
        return data[:at]
    if kind == 1 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + chance.choice((b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\xf4\x90\x80\x80")) + data[at:]
    if kind == 3:
        return data[:at] + chance.choice((b"[" * 100_000, b'{"a":' * 50_000, b"9" * 6000, b"1e999999")) + data[at:]
    if kind == 4:
        return chance.choice((b"", b"\n", b"null", b"[]", b"{}", b'"a"', b"NaN", b"-Infinity", b"\xef\xbb\xbf" + data))
    if kind == 5:
        return bytes(len(data))
    if kind == 6:
        return data + data
    if kind == 7:
        return data.replace(b":", b"=", 1) if chance.random() < 0.5 else data.replace(b"\n", b"\r")
    end = min(len(data), at + chance.randrange(1, 60))
    return data[:at] + data[end:] if kind == 8 else data[:end] + data[at:]


def replace_file(path: Path, chance: random.Random) -> None:
    """Remove a file, and possibly put a folder, a FIFO or a link in its place."""
    path.unlink()
    kind = chance.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.symlink_to(chance.choice(("/dev/zero", "/dev/null", "/dev/full", "/dev/tty")))
    elif kind == 3:
        path.symlink_to(path.name)
    elif kind == 4:
        path.symlink_to(chance.choice(("/nowhere", "..", "/proc/self/mem", "/etc/hostname")))


def damage(path: Path, chance: random.Random) -> None:
    """Change a file by its structure or by its bytes, one to four times."""
    data = path.read_bytes()
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        data = _structured(path, data, chance) if chance.random() < 0.75 else damaged_bytes(data, chance)
    path.write_bytes(data)


def _structured(path: Path, data: bytes, chance: random.Random) -> bytes:
    try:
        if path.suffix == ".toml":
            return tomli_w.dumps(mutated(tomllib.loads(data.decode()), chance)).encode(errors="surrogatepass")
        if path.suffix == ".safetensors":
            length = int.from_bytes(data[:8], "little")
            header = json.dumps(mutated(json.loads(data[8 : 8 + length]), chance)).encode()
            said = chance.choice((len(header), len(header), length, 2**63, 0))
            return said.to_bytes(8, "little") + header + data[8 + length :]
        if path.suffix in (".jsonl", ".lines"):
            lines = data.splitlines()
            at = chance.randrange(len(lines))
            lines[at] = json.dumps(mutated(json.loads(lines[at]), chance)).encode()
            return b"\n".join(lines) + b"\n"
        ascii_only = chance.random() < 0.5
        text = json.dumps(mutated(json.loads(data), chance), ensure_ascii=ascii_only)
        return text.encode(errors="surrogatepass")
    except (ValueError, RecursionError, TypeError, AttributeError, IndexError):
        return damaged_bytes(data, chance)


# ---------------------------------------------------------------------------------------------------- readers


def _make_corpus(folder: Path) -> None:
    texts = [f"text {number} with \u00e9 and some words, again and again\n" * 3 for number in range(12)]
    source = folder.parent / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    prepare_corpus(folder, inputs=[source], kind="byte", valid_fraction=0.3, num_workers=1, shard_len=600)
    source.unlink()


def _sign_corpus(folder: Path) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_bytes())
    with contextlib.suppress(OSError, TypeError, KeyError, AttributeError):
        for name, split in index["splits"].items():
            split["counts_sha256"] = describe_file(folder / f"{name}-counts.npy")["sha256"]
    index["self_sha256"] = canonical_hash(index)
    path.write_text(json.dumps(index), encoding="utf-8")


def _read_corpus(folder: Path) -> bool:
    corpus = open_corpus(folder)
    for split in map(corpus.split, corpus.split_names):
        split.check_files()
        split.counts()
        for document in split.each_document():
            assert len(document)
    assert corpus.tokenizer.vocab_size
    return not verify_corpus(folder)


def _make_tokenizers(folder: Path) -> None:
    folder.mkdir()
    texts = ["some words of a text, and some more\nin lines\n"] * 3
    from txl_dist.tokenizers.training import train_tokenizer

    for kind in ("byte", "char", "word", "bpe", "unigram"):
        size = {"vocab_size": 300} if kind in ("bpe", "unigram") else {}
        tokenizer = train_tokenizer(kind, lambda: iter(texts), **size)
        tokenizer.save(folder / f"{kind}.json")


def _make_foreign(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder.mkdir()
    library = Tokenizer(models.BPE(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits()])
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<|endoftext|>"], show_progress=False)
    library.train_from_iterator(["some words of a text 12"] * 5, trainer)
    library.save(str(folder / "foreign.json"))
    open_tokenizer(folder / "foreign.json").save(folder / "ours.json")


def _read_tokenizers(folder: Path) -> bool:
    for path in sorted(folder.iterdir()):
        tokenizer = open_tokenizer(path)
        with contextlib.suppress(TxlError):
            ids = tokenizer.encode("some words of <|endoftext|> a text 12 \u00e9")
            assert isinstance(tokenizer.decode(ids.tolist()), str)
            assert isinstance("".join(tokenizer.decode_stream(ids.tolist())), str)
        assert tokenizer.fingerprint
        with contextlib.suppress(TxlError):
            load_tokenizer(path)
    return True


def _make_bundle(folder: Path) -> None:
    section = ModelSection.model_validate(
        {"num_layers": 1, "width": 8, "num_heads": 2, "head_width": 4, "ff_width": 8, "cutoffs": [100]}
    )
    tokenizer = build_tokenizer({"kind": "word", "symbols": [str(i) for i in range(130)], "end_of_text": None,
                                 "line_end": None, "unknown": None})  # fmt: skip
    torch.manual_seed(0)
    from txl_dist.model.transformer_xl import TransformerXL

    weights = {name: p.detach() for name, p in TransformerXL(section, vocab_size=130).named_parameters()}
    network = network_of(section, vocab_size=130, weights=weights, dtype="fp32", where="")
    package = Package(section=section, weights=weights, tokenizer=tokenizer, segment_len=8, memory_len=8,
                      source={"step": 3}, probe=probe_of(network, memory_len=8))  # fmt: skip
    write_bundle(folder, package)


def _sign_manifest(folder: Path) -> None:
    if (folder / MANIFEST).is_file():
        write_manifest(folder, {name: describe_file(folder / name) for name in files_of(folder)})


def _read_bundle(folder: Path) -> bool:
    LanguageModel(load_bundle(folder)).generate("1 2 3", max_tokens=3, temperature=0.0)
    load_config(folder / "train.toml")
    return True


def _make_checkpoint(folder: Path) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    shutil.copytree(GOLDEN / "checkpoint_v2" / "step_000000016", folder / "checkpoints" / "step_000000016")


def _sign_checkpoint(folder: Path) -> None:
    _sign_manifest(folder / "checkpoints" / "step_000000016")


def _read_checkpoint(folder: Path) -> bool:
    checkpoint = folder / "checkpoints" / "step_000000016"
    checkpoint_lines(checkpoint_facts(checkpoint), max_parameters=10)
    found, *_ = newest_checkpoint(folder)
    if found is None:
        return False
    load_config(found / "config.toml")
    load_tokenizer(found / "tokenizer.json")
    for rows in consolidated_weights(found).values():
        rows[:]
    load_lane_memory(found, lanes=range(4))
    return True


def _resign_manifest(folder: Path) -> None:
    path = folder / MANIFEST
    content = json.loads(path.read_bytes())
    content["self_sha256"] = canonical_hash(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def _make_manifest(folder: Path) -> None:
    (folder / "sub").mkdir(parents=True)
    for name in ("a.json", "b.bin", "sub/c"):
        (folder / name).write_bytes(name.encode())
    _sign_manifest_of(folder)


def _sign_manifest_of(folder: Path) -> None:
    write_manifest(folder, {name: describe_file(folder / name) for name in files_of(folder)})


def _make_config(folder: Path) -> None:
    folder.mkdir()
    shutil.copy(GOLDEN / "checkpoint_v2" / "step_000000016" / "config.toml", folder / "all.toml")
    shutil.copy(ROOT / "configs" / "quickstart.toml", folder / "recipe.toml")


def _read_config(folder: Path) -> bool:
    from txl_dist.config.load import config_to_toml, plan_batch

    for path in sorted(folder.iterdir()):
        config = load_config(path)
        check_config(config)
        assert isinstance(config, Config)
        plan_batch(config.train, world_size=1)
        config_to_toml(config)
    return True


def _make_lock(folder: Path) -> None:
    folder.mkdir()
    values = {"process": process_id()._replace(host="elsewhere"), "nonce": "abcdef", "started": "2026-01-01"}
    (folder / "RUN.lock").write_text(json.dumps(values), encoding="utf-8")
    after = values | {"nonce": "abcdefab"}
    (folder / "RUN.lock.abcdef").write_text(json.dumps(after), encoding="utf-8")
    (folder / "RUN.lock.abcdefab").write_text(json.dumps(values | {"nonce": "0"}), encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.0}\n', encoding="utf-8")


def _read_lock(folder: Path) -> bool:
    read_run(folder)
    lock = RunLock.acquire(folder, stale_after_s=0.01)
    lock.beat()
    lost = lock.is_lost
    lock.release()
    return not lost


def _make_stop(folder: Path) -> None:
    folder.mkdir()
    (folder / "STOP").write_text("{}", encoding="utf-8")


def _read_stop(folder: Path) -> bool:
    requests = PreemptionRequests(stop_file=folder / "STOP")
    try:
        reason = requests.reason
        with contextlib.suppress(OSError):
            requests.clear()
    finally:
        requests.close()
    return bool(reason)


def _make_run(folder: Path) -> None:
    from tests.helpers.made_runs import make_run  # imported here because the other readers need no run

    make_run(folder, max_steps=60, num_ranks=2)


def _make_runs(folder: Path) -> None:
    for name in ("one", "two"):
        _make_run(folder / name)


def _read_report(folder: Path) -> bool:
    read_run_history(folder, up_to=100)
    run = read_run(folder)
    assert lead(run)
    assert facts_of(run)
    if _is_drawn(folder / "metrics.jsonl"):
        write_report(folder)
    return True


def _read_comparison(folder: Path) -> bool:
    both = [folder / "one", folder / "two"]
    for run in map(read_run, both):
        assert facts_of(run)
    if _is_drawn(folder / "one" / "metrics.jsonl"):
        write_comparison(both, out=folder / "page.html")
    return True


def _is_drawn(path: Path) -> bool:
    """Return whether to write the page of a case. A page takes a second, so it is written in one of twenty cases."""
    return zlib.crc32(path.read_bytes()) % 20 == 0


def _make_beat(folder: Path) -> None:
    folder.mkdir()
    beat = Beat(process_id(), 3, "train", "here", True, False, False)
    verdict = {"verdict": ["hang", [1], "a line", [process_id()]]}
    lines = [{"key": "k", "rank": 1, "beat": beat, "notice": {"failed": 1}}, verdict]
    (folder / "talk.lines").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _read_beat(folder: Path) -> bool:
    left, right = socket.socketpair()
    with left, right:
        right.sendall((folder / "talk.lines").read_bytes()[: 1 << 15])
        right.close()
        connection = Connection(left)
        try:  # as in `Hub` and `Spoke`: a peer with invalid messages is dropped
            for message in connection.receive():
                if "beat" in message:
                    int(message.get("rank", 0))
                    _beat(message["beat"]).process.lives()
        except (OSError, ValueError, TypeError, KeyError):
            return False
    return True


def _make_huggingface(folder: Path) -> None:
    shutil.copytree(GOLDEN / "hf_transfo_xl_tiny", folder)


def _read_huggingface(folder: Path) -> bool:
    out = folder.parent / "imported"
    try:
        import_model(folder, out, format="huggingface", segment_len=8, memory_len=8)
        return True
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _make_original(folder: Path) -> None:
    folder.mkdir()
    with safe_open(GOLDEN / "wt103_base_like.safetensors", "pt") as file:
        settings = json.loads(file.metadata()["config"])
        keys = [key for key in file.keys() if key.startswith("weights.")]  # noqa: SIM118  the file is not a mapping
        save_file({key.removeprefix("weights."): file.get_tensor(key) for key in keys}, folder / "weights.safetensors")
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    symbols = [str(i) for i in range(int(settings["n_token"]))]
    (folder / "vocab.json").write_text(json.dumps(symbols), encoding="utf-8")
    (folder / "ids.json").write_text(json.dumps({symbol: i for i, symbol in enumerate(symbols)}), encoding="utf-8")
    (folder / "vocab.txt").write_text("\n".join(symbols) + "\n", encoding="utf-8")


def _read_original(folder: Path) -> bool:
    out = folder.parent / "imported"
    try:
        for name in ("vocab.json", "ids.json", "vocab.txt"):
            with contextlib.suppress(TxlError):
                read_vocabulary(folder / name, vocab_size=_NUM_WORDS)
        settings, weights = folder / "settings.json", folder / "weights.safetensors"
        import_model(weights, out, format="original", settings=settings, segment_len=8, memory_len=8)
        return True
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _make_parts(folder: Path) -> None:
    folder.mkdir()
    part = {"number": 0, "stamp": "s", "inputs": "i", "begin": [0, 0, 0, 0], "end": [1, 0, 0, 0], "stored_bytes": 3,
            "documents": {"train": 1}, "counts": {"read": 1}}  # fmt: skip
    info = {"name": "t.tar", "bytes": 1, "documents": 1, "tokens": 1, "sha256": "a", "idx_sha256": "b"}
    (folder / "part-000000.json").write_text(json.dumps(part), encoding="utf-8")
    (folder / "shard-t.tar.json").write_text(json.dumps({"plan": "p", "info": info}), encoding="utf-8")
    (folder / "shard-t.tar.counts").write_bytes(np.zeros(4, np.int64).tobytes())
    (folder / "corpus").mkdir()
    for name in ("t.tar", "t.tar.idx"):
        (folder / "corpus" / name).write_bytes(b"x")


def _read_parts(folder: Path) -> bool:
    task = ShardTask(str(folder), "p", "train", "t.tar", (0, 1), 0, (0,), "<u2", 4)
    found = read_part_info(folder, 0)
    if is_written(task):
        read_written(task)
    return found is not None


def _make_job(folder: Path) -> None:
    (folder / ".out.prepare").mkdir(parents=True)
    (folder / ".out.prepare" / "job.json").write_text(json.dumps({"stamp": "s"}), encoding="utf-8")
    (folder / ".out.prepare" / "owner").write_text("process 1 on here", encoding="utf-8")
    (folder / ".out.prepare" / "part-000000.json").write_text("{}", encoding="utf-8")


def _read_job(folder: Path) -> bool:
    with claim_scratch(folder / "out", stamp="s", can_continue=True) as scratch:
        return (scratch / "part-000000.json").exists()


def _make_lines(folder: Path) -> None:
    folder.mkdir()
    (folder / "texts.jsonl").write_text('{"text": "one", "id": [1, {"a": 2}]}\n' * 3, encoding="utf-8")


def _read_lines(folder: Path) -> bool:
    if not (folder / "texts.jsonl").is_file():
        return False
    data = (folder / "texts.jsonl").read_bytes()
    for policy in ("skip", "replace", "refuse"):
        reading = Reading(encoding_errors=policy)
        for document in documents_of(TextBlock("texts.jsonl", "jsonl", "train", 0, 0, data), reading):
            document.text.encode("utf-8")
    return True


READERS: dict[str, Reader] = {
    "corpus index": Reader(_make_corpus, ("index.json",), _read_corpus, _sign_corpus),
    "corpus files": Reader(_make_corpus, ("*.npy", "*.idx", "*.tar", "tokenizer.json"), _read_corpus, _sign_corpus),
    "tokenizers": Reader(_make_tokenizers, ("*.json",), _read_tokenizers),
    "foreign tokenizers": Reader(_make_foreign, ("*.json",), _read_tokenizers),
    "manifest": Reader(_make_manifest, (MANIFEST,), lambda folder: not problems_of(folder), _resign_manifest),
    "bundle": Reader(_make_bundle, ("config.json", "train.toml", "tokenizer.json"), _read_bundle, _sign_manifest),
    "bundle tensors": Reader(_make_bundle, ("*.safetensors",), _read_bundle, _sign_manifest),
    "checkpoint state": Reader(_make_checkpoint, ("checkpoints/*/*.json", "checkpoints/*/*.toml"), _read_checkpoint,
                               _sign_checkpoint),
    "checkpoint tensors": Reader(_make_checkpoint, ("checkpoints/*/*/*.safetensors",), _read_checkpoint,
                                 _sign_checkpoint),
    "settings": Reader(_make_config, ("*.toml",), _read_config),
    "run lock": Reader(_make_lock, ("RUN.lock*",), _read_lock),
    "stop file": Reader(_make_stop, ("STOP",), _read_stop),
    "records": Reader(_make_run, ("metrics.jsonl",), _read_report),
    "runs": Reader(_make_runs, ("one/*.toml", "one/*/*/state.json", "one/*.jsonl"), _read_comparison),
    "heartbeats": Reader(_make_beat, ("talk.lines",), _read_beat, in_place=False),
    "import, huggingface": Reader(_make_huggingface, ("config.json",), _read_huggingface),
    "import, original": Reader(_make_original, ("*",), _read_original),
    "parts": Reader(_make_parts, ("*.json",), _read_parts),
    "preparation": Reader(_make_job, (".out.prepare/*",), _read_job),
    "JSON lines": Reader(_make_lines, ("*.jsonl",), _read_lines, in_place=False),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- running


def run_case(reader: Reader, sound: Path, folder: Path, chance: random.Random) -> Outcome:
    """Damage a copy of a valid folder, read the copy and remove it. Return the reader's reaction."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(sound, folder, symlinks=True)
    try:
        paths = sorted(path for pattern in reader.files for path in folder.glob(pattern))
        path = chance.choice(paths)
        if reader.in_place and chance.random() < 0.08:
            replace_file(path, chance)
            return _watched(lambda: reader.read(folder))
        damage(path, chance)
        if chance.random() < 0.67:
            with contextlib.suppress(ValueError, OSError, AttributeError, TypeError, RecursionError):
                reader.sign(folder)
        return _watched(lambda: reader.read(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _watched(read: Callable[[], bool]) -> Outcome:
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    faulthandler.dump_traceback_later(3 * LIMIT_S, exit=True)  # for code of a library that a signal does not interrupt
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Outcome("accepted" if read() else "passed over")
    except TxlError as error:
        return Outcome("refused" if str(error) else "tracebacks", str(error))
    except HangError:
        return Outcome("hangs", traceback.format_exc())
    except BaseException:  # noqa: BLE001  any other exception is a failure
        return Outcome("tracebacks", traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def _ring(*_: object) -> None:
    raise HangError


def fuzz(
    *, cases: int, seed: int, names: list[str], only: int | None = None, on_bad: Callable[[str], object] = print
) -> dict[str, Counter[str]]:
    """Return the counts of reactions by reader. All readers get the same number of cases, and each case has its own
    random numbers."""
    counts: dict[str, Counter[str]] = {}
    before = signal.signal(signal.SIGALRM, _ring)
    logger.disabled, was_disabled = True, logger.disabled
    try:
        with tempfile.TemporaryDirectory(prefix="txl-fuzz-") as scratch:
            for index, name in enumerate(announced(names, what="reader")):
                reader, found = READERS[name], counts.setdefault(name, Counter())
                sound = Path(scratch) / f"sound-{index}"
                reader.make(sound)
                outcome = _watched(lambda reader=reader, sound=sound: reader.read(_copied(sound)))  # type: ignore[misc]
                if outcome.kind != "accepted":
                    raise SystemExit(f"{name}: the undamaged file is not accepted: {outcome}")
                share = cases // len(names) + (index < cases % len(names))
                for case in range(share) if only is None else [only]:
                    chance = random.Random(f"{seed}/{name}/{case}")
                    outcome = run_case(reader, sound, Path(scratch) / "case" / "run", chance)
                    found[outcome.kind] += 1
                    if outcome.kind in ("tracebacks", "hangs") or only is not None:
                        on_bad(f"\n{name}, case {case}: {outcome.kind}\n{outcome.details}")
    finally:
        logger.disabled = was_disabled
        signal.signal(signal.SIGALRM, before)
    return counts


def _copied(sound: Path) -> Path:
    target = sound.parent / "case" / "run"
    shutil.rmtree(target.parent, ignore_errors=True)
    shutil.copytree(sound, target)
    return target


KINDS = ("refused", "accepted", "passed over", "tracebacks", "hangs")


def main() -> int:
    """Run the cases and print the table. Return 1 after a traceback or a hang."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="number of cases of all readers together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random damage")
    parser.add_argument("--reader", choices=READERS, action="append", help="test only this reader; can be repeated")
    parser.add_argument("--case", type=int, help="run only this case, and print its outcome")
    words = parser.parse_args()
    start_s = time.perf_counter()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    names = words.reader or list(READERS)
    counts = fuzz(cases=words.cases, seed=words.seed, names=names, only=words.case)
    print(f"{'reader':<22}{'cases':>8}" + "".join(f"{kind:>13}" for kind in KINDS))
    for name, found in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        print(f"{name:<22}{found.total():>8,}" + "".join(f"{found[kind]:>13,}" for kind in KINDS))
    print(f"seed {words.seed}, {time.perf_counter() - start_s:.0f} s")
    total = sum(counts.values(), Counter[str]())
    return 1 if total["tracebacks"] + total["hangs"] else 0


if __name__ == "__main__":
    sys.exit(main())
