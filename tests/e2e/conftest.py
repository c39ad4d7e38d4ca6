"""A small corpus of readable text, prepared once with the command line."""

import random
from pathlib import Path

import pytest

from tests.helpers.launch import txl

SENTENCE = "the a cat dog tree house runs sleeps under over near old small green and then it was said that nobody"
WORDS = SENTENCE.split()


def write_texts(folder: Path, *, seed: int = 3, count: int = 40) -> Path:
    """Files of random sentences; a grammar simple enough to be learnt in a few steps."""
    generator = random.Random(seed)
    folder.mkdir()
    for number in range(count):
        lines = (" ".join(generator.choices(WORDS, k=generator.randint(4, 12))) for _ in range(60))
        (folder / f"{number:03d}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bpe corpus of about 40,000 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = write_texts(folder / "texts")
    words = ["prepare", str(texts), "--out", "corpus", "--vocab-size", "400", "--valid-fraction", "0.1"]
    result = txl(*words, cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "corpus"


@pytest.fixture
def config_file(tmp_path: Path, corpus: Path) -> Path:
    return write_config(tmp_path, corpus)


def write_config(folder: Path, corpus: Path) -> Path:
    """A tiny model with everything on: three clusters, dropout, memory, two micro-batches per rank."""
    path = folder / "tiny.toml"
    path.write_text(
        f"""
[run]
dir = "run"
[data]
path = "{corpus}"
[model]
num_layers = 2
width = 64
num_heads = 2
head_width = 32
ff_width = 128
cutoffs = [100, 250]
div_value = 2
tie_projections = [false, true, true]
dropout = 0.1
attention_dropout = 0.1
[optim]
lr = 3e-3
[train]
num_lanes = 8
segment_len = 24
memory_len = 40
microbatch_lanes = 2
max_steps = 30
[checkpoint]
every_steps = 15
[metrics]
log_every_steps = 1
""",
        encoding="utf-8",
    )
    return path
