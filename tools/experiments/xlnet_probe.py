"""Compare an XLNet model with a causal model of equal size, data and CPU time, on a CPU.

    python -m tools.experiments.xlnet_probe books --work /tmp/xlnet --seeds 3 --cpu-minutes 5

`books` is a folder with the JSON lines that `tools.experiments.books` writes: {"id": "AUTHOR/TITLE", "text": ...} in
train, valid and test. The program reduces the books to 36 kinds of characters. The models are trained on the first 2.7
million characters of the books in train, in the order of the files. For each seed the program

    trains      an XLNet model and a causal model by `txl train`, each until it has used the CPU minutes,
    evaluates   both by `txl evaluate` on held-out text,
    exports     both by `txl export --format xlnet`, and loads the folders with transformers,
    fills       one hidden character in windows of held-out text (a cloze test), with transformers,
    classifies  passages by their author, after fine-tuning with transformers. The passages of one test come from the
                last tenth of the books that fine-tuning reads, those of the other test from other books. Random weights
                are fine-tuned in the same way.

Results of each seed are added to WORK/results.jsonl. The program prints their means and ranges. A seed whose results
exist is not repeated. Both models have 3 layers of width 128, segments of 64 characters and a memory of 48.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from tools.experiments.trainings import ENVIRONMENT, run_txl
from txl_dist.errors import DataError, TxlError
from txl_dist.tokenizers.base import Tokenizer
from txl_dist.tokenizers.tokenizer import load_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,;:'\"!?-"
"""The characters that remain of a text, 36 kinds."""
SEGMENT_LEN = 64
PASSAGE_LEN = 128
"""Characters of a passage that is classified."""
BATCH_PASSAGES = 16
"""Passages per step of fine-tuning."""
KINDS = ("permutation", "causal")

_SHARED = {
    "model.num_layers": "3",
    "model.width": "128",
    "model.num_heads": "4",
    "model.head_width": "32",
    "model.ff_width": "512",
    "model.dropout": "0",
    "model.attention_dropout": "0",
    "model.activation": "gelu",
    "model.share_biases": "False",
    "model.scale_embedding": "False",
    "model.norm_eps": "1e-12",
    "model.init_std": "0.05",
    "train.segment_len": str(SEGMENT_LEN),
    "train.memory_len": "48",
    "train.num_lanes": "16",
    "train.microbatch_lanes": "16",
    "train.max_steps": "1000000",
    "optim.lr": "1e-3",
    "optim.schedule": "constant",
    "optim.clip_norm": "1.0",
    "eval.every_steps": "0",
    "metrics.log_every_steps": "10",
    "metrics.sample_every_steps": "0",
    "checkpoint.every_steps": "0",
}
_OF_KIND = {
    "permutation": {
        "model.any_order": "True",
        "train.objective": "permutation",
        "train.reuse_len": "32",
        "train.predicted_len": "11",
        "train.initial_memory": "zeros",
    },
    "causal": {},
}


class Book(NamedTuple):
    """Text of a book, its author, and the folder of the split that it belongs to."""

    author: str
    title: str
    split: str
    text: str


class Texts(NamedTuple):
    """Texts of one run of the program, reduced to ALPHABET."""

    train: str
    """Text on which the models are trained."""
    valid: str
    """The text that follows `train`. Losses are measured on it."""
    authors: dict[str, str]
    """Text by author, for fine-tuning the classifier."""
    chapters: dict[str, str]
    """The text that follows `authors` in the same books, by author. The classifier is tested on it."""
    books: dict[str, str]
    """Text of other books, by author. The classifier is tested on it too."""


class Sizes(NamedTuple):
    """How much text, time and fine-tuning a run of the program uses."""

    text_chars: int = 3_000_000
    """Characters of text for training the models. The last tenth is held out."""
    valid_chars: int = 60_000
    """Characters of the held-out tenth on which losses are measured."""
    num_authors: int = 6
    author_chars: int = 500_000
    """Characters of text per author for the classifier. The last tenth is held out."""
    cpu_s: float = 300.0
    """CPU seconds of each training."""
    num_windows: int = 2000
    """Windows of the cloze test."""
    num_passages: int = 1500
    """Passages of fine-tuning, shared equally by the authors."""
    num_test_passages: int = 900
    """Passages of each test, shared equally by the authors."""
    epochs: int = 4


TINY = Sizes(
    text_chars=8000,
    valid_chars=600,
    num_authors=2,
    author_chars=4000,
    cpu_s=1.0,
    num_windows=20,
    num_passages=16,
    num_test_passages=8,
    epochs=1,
)
"""Sizes for a test of the program itself."""


def reduced(text: str) -> str:
    """Return a text in lower case, with each run of other characters than ALPHABET replaced by one space."""
    text = text.lower().replace("\u2019", "'").replace("\u201c", '"').replace("\u201d", '"').replace("\u2014", "-")
    text = re.sub(f"[^{re.escape(ALPHABET)}]+", " ", text)
    return re.sub(" +", " ", text)


def read_books(folder: Path) -> list[Book]:
    """Read the books below a folder, in the order of the files. Raises DataError if there are none."""
    books = []
    for path in sorted(folder.rglob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            author, _, title = record["id"].partition("/")
            books.append(Book(author, title, path.parent.name, record["text"]))
    if not books:
        raise DataError(f"{folder} holds no books. Write them with `python -m tools.experiments.books`.")
    return books


def choose_texts(books: Sequence[Book], sizes: Sizes) -> Texts:
    """Choose the text of the trainings, and the authors and books of the classifier.

    The authors are those with the most text in two books or more, which are not in the text of the trainings. The last
    book of each author by title is held out. Raises DataError if there is too little text, or too few such authors.
    """
    text = ""
    used = set()
    for book in books:
        if book.split == "train" and len(text) < sizes.text_chars:
            text += reduced(book.text) + " "
            used.add(book.author)
    if len(text) < sizes.text_chars:
        raise DataError(f"The books in train have {len(text):,} characters, not {sizes.text_chars:,}.")
    train, held_out = _split(text[: sizes.text_chars])
    by_author: dict[str, list[Book]] = {}
    for book in sorted(books, key=lambda book: (book.author, book.title)):
        if book.author not in used:
            by_author.setdefault(book.author, []).append(book)
    candidates = {
        author: own
        for author, own in by_author.items()
        if len(own) > 1 and sum(len(book.text) for book in own[:-1]) >= 1.2 * sizes.author_chars
    }
    by_text = sorted(candidates, key=lambda author: (-sum(len(book.text) for book in candidates[author]), author))
    authors = sorted(by_text[: sizes.num_authors])
    if len(authors) < sizes.num_authors:
        raise DataError(
            f"{len(authors)} authors have two books and {sizes.author_chars:,} characters, not {sizes.num_authors}."
        )
    texts = Texts(train, held_out[: sizes.valid_chars], authors={}, chapters={}, books={})
    for author in authors:
        own = candidates[author]
        joined = reduced(" ".join(book.text for book in own[:-1]))
        texts.authors[author], texts.chapters[author] = _split(joined[: sizes.author_chars])
        texts.books[author] = reduced(own[-1].text)
    return texts


def _split(text: str) -> tuple[str, str]:
    """Split a text into its first nine tenths and its last tenth."""
    train_len = len(text) * 9 // 10
    return text[:train_len], text[train_len:]


def prepare(texts: Texts, work: Path) -> Path:
    """Write the training and validation text and make a corpus of characters of it. Returns the corpus folder."""
    corpus = work / "corpus"
    if not (corpus / "index.json").is_file():
        for name, text in (("train", texts.train), ("valid", texts.valid)):
            (work / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
        words = ["--valid", work / "valid.jsonl", "--tokenizer", "char", "--observed-symbols", "--out", corpus]
        run_txl("prepare", work / "train.jsonl", *words)
    return corpus


def train_for(run: Path, kind: str, *, corpus: Path, seed: int, cpu_s: float) -> float:
    """Train a model until its process has used `cpu_s` CPU seconds. Returns the CPU seconds.

    The process gets SIGTERM then, but not before its first recorded loss. So it saves a checkpoint. Raises DataError if
    the process ends by itself.
    """
    settings = _SHARED | _OF_KIND[kind] | {"data.path": str(corpus), "run.dir": str(run), "run.seed": str(seed)}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    words += ["--optim.betas", "0.9", "0.98"]
    command = [sys.executable, "-m", "txl_dist", "train", *words]
    run.parent.mkdir(parents=True, exist_ok=True)
    with (run.parent / f"{run.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        used_s = 0.0
        while process.poll() is None:
            used_s = max(used_s, _cpu_seconds(process.pid))
            if used_s >= cpu_s and _has_trained(run):
                os.kill(process.pid, signal.SIGTERM)
                process.wait()
            time.sleep(0.2)
    if used_s < cpu_s:
        raise DataError(f"{run}: the training ended after {used_s:.0f} CPU seconds. Read {run}.log.")
    return used_s


def _has_trained(run: Path) -> bool:
    """Return True if a run has recorded the loss of a training step."""
    file = run / "metrics.jsonl"
    return file.is_file() and '"kind": "train"' in file.read_text(encoding="utf-8")


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its children. 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        total_s = 0.0
        for member in (process, *process.children(recursive=True)):
            times = member.cpu_times()
            total_s += times.user + times.system
        return total_s
    except psutil.Error:
        return 0.0


def evaluate(run: Path, kind: str) -> dict[str, Any]:
    """Return the losses of a run by `txl evaluate`: over random orders, or of the next character."""
    out = run.parent / f"{run.name}.json"
    if kind == "permutation":
        run_txl("evaluate", run, "--orders", 2, "--json", out)
        result = json.loads(out.read_text(encoding="utf-8"))["random orders"]
        by_rank = [part["accuracy_pct"] for part in result["by_rank"]]
        return {
            "loss": result["loss"],
            "accuracy_pct": result["accuracy_pct"],
            "loss_by_rank": [part["loss"] for part in result["by_rank"]],
            "accuracy_by_rank": by_rank,
            "last_rank_accuracy_pct": by_rank[-1],
        }
    run_txl("evaluate", run, "--accuracy", "--json", out)
    result = json.loads(out.read_text(encoding="utf-8"))["model"]
    return {"loss": result["loss"], "accuracy_pct": result["accuracy_pct"]}


@torch.no_grad()
def cloze_accuracy(folder: Path, ids: np.ndarray, *, num_windows: int, batch_size: int = 50) -> float:
    """Return the share of hidden characters, the middle one of each window, that transformers' model fills in.

    An XLNet model sees all other characters of the window. A causal model sees those before the hidden one.
    """
    from transformers import XLNetLMHeadModel

    model = XLNetLMHeadModel.from_pretrained(folder).eval()
    starts = np.linspace(0, len(ids) - SEGMENT_LEN - 1, num_windows).astype(int)
    windows = torch.from_numpy(np.stack([ids[start : start + SEGMENT_LEN] for start in starts]))
    place = SEGMENT_LEN // 2
    num_correct = 0
    for window_BT in windows.split(batch_size):
        if model.config.attn_type == "bi":
            rows = len(window_BT)
            perm_mask = torch.zeros(rows, SEGMENT_LEN, SEGMENT_LEN)
            perm_mask[:, :, place] = 1  # 1 means that a row does not see the column
            target_mapping = torch.zeros(rows, 1, SEGMENT_LEN)
            target_mapping[:, 0, place] = 1
            logits_BV = model(input_ids=window_BT, perm_mask=perm_mask, target_mapping=target_mapping).logits[:, 0]
        else:
            logits_BV = model(input_ids=window_BT[:, :place]).logits[:, -1]
        num_correct += int((logits_BV.argmax(-1) == window_BT[:, place]).sum())
    return num_correct / num_windows


def passages(texts: Mapping[str, str], tokenizer: Tokenizer, *, total: int) -> tuple[Tensor, Tensor]:
    """Cut passages from each author's text, evenly spaced. Returns (ids [P, PASSAGE_LEN], author numbers [P])."""
    rows = []
    labels = []
    for label, text in enumerate(texts.values()):
        count = total // len(texts)
        starts = np.linspace(0, len(text) - PASSAGE_LEN - 1, count).astype(int)
        for start in starts:
            rows.append(tokenizer.encode(text[start : start + PASSAGE_LEN])[:PASSAGE_LEN])
            labels.append(label)
    return torch.tensor(np.stack(rows), dtype=torch.int64), torch.tensor(labels)


def classifier_accuracy(
    folder: Path, texts: Texts, tokenizer: Tokenizer, sizes: Sizes, *, seed: int, fresh: bool
) -> dict[str, float]:
    """Fine-tune transformers' sequence classifier on the authors of passages.

    The classifier reads the mean of the last layer's hidden states. With `fresh` the weights are random instead of
    those of the folder. Returns the accuracy in percent on held-out chapters and on held-out books.
    """
    from transformers import XLNetConfig, XLNetForSequenceClassification

    torch.manual_seed(seed)
    changes = {"num_labels": len(texts.authors), "summary_type": "mean"}
    if fresh:
        model = XLNetForSequenceClassification(XLNetConfig.from_pretrained(folder, **changes))
    else:
        model = XLNetForSequenceClassification.from_pretrained(folder, **changes)
    ids_PT, labels_P = passages(texts.authors, tokenizer, total=sizes.num_passages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    num_batches = sizes.epochs * math.ceil(len(ids_PT) / BATCH_PASSAGES)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-4, total_steps=num_batches, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(sizes.epochs):
        order = torch.randperm(len(ids_PT), generator=generator)
        for batch in order.split(BATCH_PASSAGES):
            loss = model(input_ids=ids_PT[batch], labels=labels_P[batch]).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()
    accuracies = {}
    for name, held_out in (("chapters", texts.chapters), ("books", texts.books)):
        test_PT, test_labels_P = passages(held_out, tokenizer, total=sizes.num_test_passages)
        accuracies[f"classifier_{name}_pct"] = 100 * _accuracy(model, test_PT, test_labels_P)
    return accuracies


@torch.no_grad()
def _accuracy(model: Any, ids_PT: Tensor, labels_P: Tensor, *, batch_size: int = 50) -> float:
    """Return the share of passages whose label a classifier of transformers finds."""
    num_correct = 0
    for ids_BT, labels_B in zip(ids_PT.split(batch_size), labels_P.split(batch_size), strict=True):
        num_correct += int((model(input_ids=ids_BT).logits.argmax(-1) == labels_B).sum())
    return num_correct / len(ids_PT)


def run_seed(seed: int, texts: Texts, *, corpus: Path, work: Path, sizes: Sizes) -> dict[str, Any]:
    """Train, evaluate, export and fine-tune both models of a seed. Returns all results."""
    result: dict[str, Any] = {"seed": seed}
    tokenizer = load_tokenizer(corpus / "tokenizer.json")
    valid_ids = np.asarray(tokenizer.encode(texts.valid), dtype=np.int64)
    for kind in KINDS:
        run = work / f"seed{seed}" / kind
        if not run.with_suffix(".done").is_file():
            cpu_s = train_for(run, kind, corpus=corpus, seed=seed, cpu_s=sizes.cpu_s)
            run.with_suffix(".done").write_text(f"{cpu_s}\n", encoding="utf-8")
        found = evaluate(run, kind)
        folder = run.with_name(f"{kind}-folder")
        run_txl("export", run, folder, "--format", "xlnet")
        found["cloze_accuracy_pct"] = 100 * cloze_accuracy(folder, valid_ids, num_windows=sizes.num_windows)
        found |= classifier_accuracy(folder, texts, tokenizer, sizes, seed=seed, fresh=False)
        result[kind] = found
    folder = work / f"seed{seed}" / "permutation-folder"
    result["random weights"] = classifier_accuracy(folder, texts, tokenizer, sizes, seed=seed, fresh=True)
    return result


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: the mean of the seeds for each number, and the lowest and the highest."""
    lines = []
    for kind in (*KINDS, "random weights"):
        for name, value in results[0][kind].items():
            if isinstance(value, list):
                continue
            values = [result[kind][name] for result in results]
            lines.append(f"{kind:15} {name:24} {np.mean(values):8.3f}  ({min(values):.3f} to {max(values):.3f})")
    for name in ("loss_by_rank", "accuracy_by_rank"):
        means = np.mean([result["permutation"][name] for result in results], axis=0)
        lines.append(f"permutation {name}: {' '.join(f'{mean:.2f}' for mean in means)}")
    return lines


def main() -> None:
    """Run the seeds that have no results yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path, help="folder with JSON lines of books")
    parser.add_argument("--work", type=Path, required=True, help="folder for corpus, runs and results")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--cpu-minutes", type=float, default=5.0, help="CPU minutes of each training")
    parser.add_argument("--tiny", action="store_true", help="run on little text, to test this program")
    options = parser.parse_args()
    sizes = TINY if options.tiny else Sizes(cpu_s=60 * options.cpu_minutes)
    torch.set_num_threads(1)
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    texts = choose_texts(read_books(options.books), sizes)
    corpus = prepare(texts, work)
    file = work / "results.jsonl"
    results = []
    if file.is_file():
        results = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for seed in range(1, options.seeds + 1):
        if any(result["seed"] == seed for result in results):
            continue
        result = run_seed(seed, texts, corpus=corpus, work=work, sizes=sizes)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(result) + "\n")
        results.append(result)
    print("\n".join(table(results)))


if __name__ == "__main__":
    try:
        main()
    except TxlError as error:
        sys.exit(f"xlnet_probe: {error}")
