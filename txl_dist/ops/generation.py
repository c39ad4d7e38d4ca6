"""`txl generate`: prompts of the command line, files and pipes; texts for people as they are made, or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from txl_dist.console import say, write_text
from txl_dist.errors import ConfigError
from txl_dist.infer.language_model import LanguageModel, Text
from txl_dist.infer.settings import Writing
from txl_dist.infer.text_memory import TextMemory
from txl_dist.infer.writer import Piece
from txl_dist.log import start_logging
from txl_dist.ops.export import load

STANDARD = Path("-")
"""In place of a file: standard input or output."""


class Given(NamedTuple):
    """A prompt as somebody gave it."""

    text: Text
    record: dict[str, Any]
    """What is told of it beside its texts."""


def generate_texts(
    source: Path,
    *,
    given: Iterable[Given],
    is_one: bool,
    writing: Writing,
    out: Path | None,
    load_memory: Path | None,
    save_memory: Path | None,
) -> None:
    """Generate with a run, a checkpoint or a bundle. `out` is for JSON lines; without it the texts are for people.

    `is_one`: it is one text, which is shown as it is made.

    Raises CheckpointError if the model or the memory cannot be read, ConfigError for a prompt that it cannot go on
    with, for settings out of range and for files that cannot be written.
    """
    start_logging()
    with ExitStack() as stack:
        sink = None if out is None else _open(out, stack)
        model = load(source)
        memory = None if load_memory is None else model.load_memory(load_memory)
        kept: list[Given] = []
        prompts = (_keep(kept, one).text for one in given)
        pieces = model.write(prompts, writing, memory=memory, keep_memory=save_memory is not None)
        if is_one and sink is None:
            _show(pieces, model, kept, memory, save_memory)
            return
        for piece, text in _whole_texts(pieces, num_samples=writing.num_samples):
            assert piece.ending is not None
            one = kept[piece.prompt]
            made = model.generation(text, piece.ending, model.prompt(one.text, memory))
            if sink is None:
                say(f"--- prompt {piece.prompt + 1}, sample {piece.sample + 1}: {made.finish}")
                write_text((one.text if isinstance(one.text, str) else model.decode(one.text)) + text + "\n")
            else:
                record = one.record | {"sample": piece.sample, "text": text, "finish": made.finish, "ids": made.ids}
                if writing.log_probs >= 0:
                    record |= {"log_probs": made.log_probs, "top": made.top}
                sink.write(json.dumps(record) + "\n")
                sink.flush()
            if save_memory is not None and made.memory is not None:
                made.memory.save(save_memory)


def prompts_in_lines(lines: Iterable[str], *, where: str) -> Iterator[Given]:
    """Prompts of JSON lines: {"prompt": text} or {"tokens": [ids]}; what else a line holds is told with its texts.

    Raises ConfigError, with the line, for what is neither.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}, line {number}: no JSON ({error}). Mend it.") from error
        text = None if not isinstance(record, dict) else record.get("prompt", record.get("tokens"))
        is_ids = isinstance(text, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in text)
        if not (isinstance(text, str) or is_ids):
            raise ConfigError(
                f'{where}, line {number}: it must be an object with "prompt", a text, or "tokens", a list of ids.'
            )
        assert text is not None
        yield Given(text, record)


def read_lines(path: Path) -> Iterator[str]:
    """Of a file or of standard input, as they come. Raises ConfigError if it cannot be read, or is not UTF-8."""
    try:
        if path == STANDARD:
            yield from sys.stdin
            return
        with path.open(encoding="utf-8") as stream:
            yield from stream
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Name another file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid UTF-8 (byte {error.start}). Give it as UTF-8.") from error


def _show(
    pieces: Iterator[Piece], model: LanguageModel, kept: list[Given], memory: TextMemory | None, save: Path | None
) -> None:
    """One text, prompt and all, as it is made."""
    shown = ""
    for piece in pieces:
        text = kept[0].text
        if not shown:
            write_text(text if isinstance(text, str) else model.decode(text))
        write_text(piece.text)
        shown += piece.text or " "
        if piece.ending and save is not None:
            made = model.generation(shown, piece.ending, model.prompt(text, memory))
            assert made.memory is not None
            made.memory.save(save)
    write_text("\n")


def _whole_texts(pieces: Iterator[Piece], *, num_samples: int) -> Iterator[tuple[Piece, str]]:
    """(last piece, text) of each text, in the order of prompts and samples, whichever ends first."""
    texts: dict[tuple[int, int], str] = {}
    ended: dict[tuple[int, int], Piece] = {}
    turn = (0, 0)
    for piece in pieces:
        key = piece.prompt, piece.sample
        texts[key] = texts.get(key, "") + piece.text
        if piece.ending:
            ended[key] = piece
        while turn in ended:
            yield ended.pop(turn), texts.pop(turn)
            turn = (turn[0], turn[1] + 1) if turn[1] + 1 < num_samples else (turn[0] + 1, 0)


def _keep(kept: list[Given], one: Given) -> Given:
    kept.append(one)
    return one


def _open(path: Path, stack: ExitStack) -> TextIO:
    """Before the model is read, not after it."""
    if path == STANDARD:
        return sys.stdout
    try:
        return stack.enter_context(path.open("w", encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}. Name another file with --out.") from error
