"""Shards in the layouts of three public programs are prepared, and a run trains on them."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path

import pytest
import webdataset

from tests.helpers.corpora import random_texts
from tests.helpers.launch import txl
from txl_dist.data.prepare.run import prepare_corpus

pytestmark = [pytest.mark.dist, pytest.mark.slow]
TEXTS = random_texts(count=40, seed=3)


def write_as_webdatasets_tests(path: Path) -> dict[str, str]:
    """Compressed text alone, as in testdata/testgz.tar."""
    with webdataset.TarWriter(str(path)) as writer:
        for number, text in enumerate(TEXTS):
            writer.write({"__key__": f"{number:032x}", "txt.gz": gzip.compress(text.encode())})
    return {}


def write_as_img2dataset(path: Path) -> dict[str, str]:
    """Image, caption and facts of each sample."""
    with path.open("wb") as stream, webdataset.TarWriter(stream) as writer:
        for number, text in enumerate(TEXTS):
            facts = json.dumps({"caption": text, "status": "success"}, indent=4)
            writer.write({"__key__": f"{number:09d}", "jpg": b"\xff\xd8\xff", "txt": text, "json": facts})
    return {"member": "json", "jsonl_field": "caption"}


def write_as_hugging_face_datasets(path: Path) -> dict[str, str]:
    """Files of a folder, added one after the other."""
    with tarfile.open(path, "w") as archive:
        for number, text in enumerate(TEXTS):
            for suffix, content in (("txt", text.encode()), ("jpg", b"\xff\xd8\xff")):
                file = path.parent / f"{number:05d}.{suffix}"
                file.write_bytes(content)
                archive.add(file, file.name)
                file.unlink()
    return {"member": "txt"}


def test_shards_of_three_programs_are_prepared_and_trained_on(tmp_path: Path) -> None:
    corpora = []
    for write in (write_as_webdatasets_tests, write_as_img2dataset, write_as_hugging_face_datasets):
        tar = tmp_path / f"{write.__name__}.tar"
        settings = write(tar)
        corpus = prepare_corpus(
            tmp_path / write.__name__, inputs=[tar], kind="byte", valid_fraction=0.2, **settings
        ).corpus
        assert sum(split.documents for split in corpus.splits.values()) == len(TEXTS)
        corpora.append(corpus)
    first, *others = corpora
    assert all(corpus.fingerprint == first.fingerprint for corpus in others)
    arguments = ["--data.path", first.location, "--train.max_steps", "20", "--train.segment_len", "8"]
    arguments += ["--train.num_lanes", "2", "--train.microbatch_lanes", "2", "--model.num_layers", "1"]
    arguments += ["--model.width", "16", "--model.num_heads", "1", "--model.head_width", "16", "--model.ff_width", "16"]
    arguments += ["--train.memory_len", "8", "--run.dir", str(tmp_path / "run")]
    done = txl("train", *arguments, cwd=tmp_path, timeout_s=500)
    assert done.returncode == 0, done.stderr
    assert "done: 20 steps" in done.stdout + done.stderr
