"""A harmful pickle in place of every file of a run, a checkpoint, a bundle and a corpus: its code is never executed.

Manifests are written again for the harmful file, so that it is not refused because of its checksum. Every command that
reads such a folder is tried. It may refuse the file or ignore it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.chaos.lab import Case, Lab, Trial
from tests.chaos.runs import Run
from tests.helpers.job import Job
from txl_dist.artifacts import list_checkpoints
from txl_dist.io.files import sha256_of_file, write_hashed_json
from txl_dist.io.manifest import MANIFEST, describe_file, files_of, write_manifest


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.flag}'",)


KINDS = ("pickle", "torch", "numpy")


def payload(kind: str, flag: Path) -> bytes:
    """The crafted object as a plain pickle, as torch writes files, or as an array of objects."""
    data = io.BytesIO()
    if kind == "pickle":
        pickle.dump(Evil(flag), data)
    elif kind == "torch":
        torch.save({"module": Evil(flag), "optimizer_state_dict": Evil(flag)}, data)
    else:
        np.save(data, np.array([Evil(flag)], dtype=object), allow_pickle=True)
    return data.getvalue()


def poisoned(
    lab: Lab,
    *,
    what: str,
    source: Path,
    name: str,
    seal: Callable[[Path], None],
    commands: list[list[str]],
    kinds: Collection[str] = KINDS,
) -> Case:
    """Replace one file of a copy of `source` by each payload and try the commands; `{}` in their words is the copy."""
    case = lab.case(f"pickles: {what}", fault=name)
    case.trials, executed, tracebacks = 0, 0, 0
    flag, log = lab.folder / "executed", lab.folder / "pickles.log"
    for kind in kinds:
        folder = lab.folder / f"poisoned-{kind}"
        shutil.copytree(source, folder)
        (folder / name).write_bytes(payload(kind, flag))
        seal(folder)
        for command in commands:
            ranks = 2 if command[0] == "train" else 1
            with Job(*(word.format(folder) for word in command), log=log, ranks=ranks) as job:
                case.exit_codes.append(job.wait())
                tracebacks += "Traceback" in job.text
            case.trials += 1
            executed += flag.exists()
            flag.unlink(missing_ok=True)
        shutil.rmtree(folder)
    if executed:
        case.problems.append(f"executed {executed} of {case.trials} times")
    case.message_ok = not tracebacks
    return lab.report(case)


def sealed(folder: Path) -> None:
    """Sign the manifests of a folder, and of the newest checkpoint in it, again."""
    for one in [folder, *list_checkpoints(folder)[-1:]]:
        if (one / MANIFEST).exists():
            write_manifest(one, {name: describe_file(one / name) for name in files_of(one)})


def sealed_corpus(folder: Path) -> None:
    """Sign the index of a corpus again, over shards and their indices as they lie there."""
    try:
        index: dict[str, Any] = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    except ValueError:
        return  # the index itself was replaced
    for split in index["splits"].values():
        for shard in split["shards"]:
            tar = folder / shard["name"]
            shard |= {"bytes": tar.stat().st_size, "sha256": sha256_of_file(tar)}
            shard["idx_sha256"] = sha256_of_file(tar.with_name(tar.name + ".idx"))
    write_hashed_json(folder / "index.json", {key: value for key, value in index.items() if key != "self_sha256"})


def control(lab: Lab) -> Case:
    """The payloads do run when they are read carelessly: without this, the cases would prove nothing."""
    case, flag = lab.case("pickles: control"), lab.folder / "executed"
    careless: dict[str, Callable[[io.BytesIO], object]] = {
        "pickle": pickle.load,
        "torch": partial(torch.load, weights_only=False),
        "numpy": partial(np.load, allow_pickle=True),
    }
    case.trials = len(careless)
    for kind, read in careless.items():
        read(io.BytesIO(payload(kind, flag)))
        if not flag.exists():
            case.problems.append("a payload is harmless")
        flag.unlink(missing_ok=True)
    return lab.report(case)


def _run_to_poison(lab: Lab, *, stage: int) -> Run:
    """A finished run that can go on: the copies ask for more steps."""
    return lab.unbroken("--engine.zero_stage", str(stage), "--train.max_steps", "12")


def in_checkpoints(lab: Lab, *, stage: int, pattern: str = "*") -> Iterator[Trial]:
    """Every file of a checkpoint, and of the run around it."""
    run = _run_to_poison(lab, stage=stage)
    newest = list_checkpoints(run.dir)[-1].relative_to(run.dir)
    files = sorted((newest / name).as_posix() for name in (*files_of(run.dir / newest), MANIFEST))
    files += sorted(path.name for path in run.dir.iterdir() if path.is_file())
    go_on = ["train", str(lab.config), "--run.dir", "{}", "--engine.zero_stage", str(stage), "--train.max_steps", "14"]
    commands = [go_on, ["export", "{}", str(lab.folder / "exported")], ["verify", "{}"]]
    # Another number of ranks or stage reads the same files by another way.
    other = [*go_on[:-3], "0" if stage else "1", *go_on[-2:]]
    for name in files:
        if Path(name).match(pattern):
            reads = [*commands, other] if "/engine/" in name else commands
            yield partial(
                poisoned, lab, what=f"checkpoint ZeRO-{stage}", source=run.dir, name=name, seal=sealed, commands=reads
            )


def in_bundle(lab: Lab) -> Iterator[Trial]:
    """Every file of a bundle."""
    bundle = lab.folder / "bundle"
    with Job(
        "export", str(_run_to_poison(lab, stage=1).dir), str(bundle), log=lab.folder / "export.log", ranks=1
    ) as job:
        assert job.wait() == [0], job.text
    run_dir = str(lab.folder / "from-bundle")
    begin = ["train", str(lab.config), "--run.dir", run_dir, "--train.max_steps", "1", "--init", "{}"]
    commands = [["generate", "{}", "--max-tokens", "3"], ["verify", "{}"], begin]
    for name in (*files_of(bundle), MANIFEST):
        yield partial(poisoned, lab, what="bundle", source=bundle, name=name, seal=sealed, commands=commands)


def in_corpus(lab: Lab) -> Iterator[Trial]:
    """Every kind of file of a corpus, and inside a shard."""
    corpus = Path(lab.corpus)
    run_dir = str(lab.folder / "from-corpus")
    read = ["train", str(lab.config), "--data.path", "{}", "--run.dir", run_dir, "--train.max_steps", "2"]
    commands = [read, ["verify", "{}"], ["inspect", "{}"]]
    kinds = {path.suffix: path.name for path in sorted(corpus.iterdir()) if path.is_file()}
    names = [*kinds.values(), "tokenizer.json", "index.json"]
    for name in dict.fromkeys(names):
        yield partial(poisoned, lab, what="corpus", source=corpus, name=name, seal=sealed_corpus, commands=commands)
    for suffix in (".npy", ".pyd", ".pickle", ".pth"):
        tar = next(iter(sorted(corpus.glob("train-*.tar")))).name

        def into_member(folder: Path, tar: str = tar, suffix: str = suffix) -> None:
            """What was written over the whole shard becomes one member of it."""
            data = (folder / tar).read_bytes()
            with tarfile.open(folder / tar, "w") as archive:
                member = tarfile.TarInfo(f"000000000{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
            sealed_corpus(folder)

        case_name = f"corpus, {suffix} in a shard"
        yield partial(poisoned, lab, what=case_name, source=corpus, name=tar, seal=into_member, commands=commands)


def pickles(lab: Lab) -> Iterator[Trial]:
    """Every kind of file."""
    yield partial(control, lab)
    for stage in (0, 1, 3):
        yield from in_checkpoints(lab, stage=stage, pattern="*" if stage == 1 else "engine/*")
    yield from in_bundle(lab)
    yield from in_corpus(lab)
