"""`txl generate`: prompts of the command line, files and pipes; texts for people as they are made, or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from txl_dist.console.echo import echo, write_text
from txl_dist.console.logging import start_logging
from txl_dist.convert.export import load
from txl_dist.errors import ConfigError, TxlError
from txl_dist.inference.language_model import LanguageModel, Text
from txl_dist.inference.options import SamplingParams
from txl_dist.inference.scheduler import OutputChunk, Prompt
from txl_dist.inference.text_memory import TextMemory
from txl_dist.io.files import Record, open_text, parse_record, read_as_text

STANDARD = Path("-")
"""In place of a file: standard input or output."""


class Given(NamedTuple):
    """A prompt as somebody gave it."""

    text: Text
    record: dict[str, Any]
    """What is told of it beside its texts."""
    where: str = ""
    """Line of a file, for errors."""


def generate_texts(
    source: Path,
    *,
    given: Iterable[Given],
    is_one: bool,
    writing: SamplingParams,
    out: Path | None,
    load_memory: Path | None,
    save_memory: Path | None,
    device: str = "cpu",
) -> None:
    """Generate with a run, a checkpoint or a bundle. `out` is for JSON lines; without it the texts are for people.

    `is_one`: it is one text, which is shown as it is made.

    Raises CheckpointError if the model or the memory cannot be read, ConfigError for settings out of range, a device
    that is not there, files that cannot be written, and a prompt that it cannot go on with: then once the texts of all
    prompts before it are written.
    """
    start_logging()
    with _filling(), ExitStack() as stack:
        model = load(source, device=device)
        memory = None if load_memory is None else model.load_memory(load_memory)
        begun: dict[int, tuple[Given, Prompt]] = {}
        problems: list[ConfigError] = []
        prompts = _begun(given, model, memory, begun, problems)
        pieces = model.write(prompts, writing, keep_memory=save_memory is not None)
        sink: TextIO | None = None
        is_shown = is_one and out is None
        if is_shown:
            pieces = _shown(pieces, model, begun)
        for piece, text in _whole_texts(pieces, num_samples=writing.num_samples):
            assert piece.ending is not None
            is_last = piece.sample == writing.num_samples - 1
            one, prompt = begun.pop(piece.prompt) if is_last else begun[piece.prompt]
            made = model.generation(text, piece.ending, prompt)
            if out is not None:
                sink = sink or _opened(out, stack)  # not before: a prompt that is refused leaves an older file alone
                record = one.record | {"sample": piece.sample, "text": text, "finish": made.finish, "ids": made.ids}
                if writing.log_probs >= 0:
                    record |= {"log_probs": made.log_probs, "top": made.top}
                sink.write(json.dumps(record) + "\n")
                sink.flush()
            elif not is_shown:
                echo(f"--- prompt {piece.prompt + 1}, sample {piece.sample + 1}: {made.finish}")
                write_text(_text_of(one, model) + text + "\n")
            if save_memory is not None and made.memory is not None:
                made.memory.save(save_memory)
        if problems:
            raise problems[0]


def _opened(path: Path, stack: ExitStack) -> TextIO:
    return sys.stdout if path == STANDARD else stack.enter_context(path.open("w", encoding="utf-8"))


_TOLD = ("sample", "text", "finish", "ids", "log_probs", "top")
"""What is told of each text, beside what its line held."""


def prompts_in_lines(lines: Iterable[str], *, where: str) -> Iterator[Given]:
    """Prompts of JSON lines: {"prompt": text} or {"tokens": [ids]}; what else a line holds is told with its texts.

    Raises ConfigError, with the line, for what is neither or both, and for what would be overwritten.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{where}, line {number}: "
        try:
            record = parse_record(line)
            json.dumps(record, allow_nan=False)  # as which it shall come back
        except RecursionError as error:
            raise ConfigError(f"{place}nested too deeply to come back with its texts. Leave that out.") from error
        except ValueError as error:
            raise ConfigError(f"{place}no JSON ({error}). Mend it.") from error
        values = record if isinstance(record, Record) else Record()
        if values.repeated:
            raise ConfigError(f"{place}{', '.join(sorted(values.repeated))}: twice in the record. Remove one.")
        (text, *others) = [values[key] for key in ("prompt", "tokens") if values.get(key) is not None] or [None]
        is_ids = isinstance(text, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in text)
        if others or not (isinstance(text, str) or is_ids):
            raise ConfigError(f'{place}it must be an object with "prompt", a text, or "tokens", a list of ids.')
        if taken := [key for key in _TOLD if values.get(key) is not None]:
            raise ConfigError(f"{place}{', '.join(taken)}: what is made would be written over it. Rename it.")
        yield Given(text, record, place)


def read_lines(path: Path) -> Iterator[str]:
    """Of a file or of standard input, as they come. Raises ConfigError if it cannot be read, or is not UTF-8."""
    try:
        if path == STANDARD:
            if sys.stdin is None:
                raise ConfigError("standard input is closed. Name a file.")
            if isinstance(sys.stdin, TextIOWrapper):
                read_as_text(sys.stdin)
            yield from sys.stdin
            return
        with open_text(path) as stream:
            yield from stream
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Name another file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid UTF-8 (byte {error.start}). Give it as UTF-8.") from error


def _begun(
    given: Iterable[Given],
    model: LanguageModel,
    memory: TextMemory | None,
    begun: dict[int, tuple[Given, Prompt]],
    problems: list[ConfigError],
) -> Iterator[Prompt]:
    """The prompts, one by one; those in work stand in `begun` by their number. They end before one that cannot be gone
    on with, whose error goes to `problems`: those in work shall be written first."""
    where = ""
    try:
        for number, one in enumerate(given):
            where = one.where
            begun[number] = one, model.prompt(one.text, memory)
            where = ""
            yield begun[number][1]
    except TxlError as error:
        problems.append(ConfigError(f"{where}{error}"))


def _shown(
    pieces: Iterable[OutputChunk], model: LanguageModel, begun: dict[int, tuple[Given, Prompt]]
) -> Iterator[OutputChunk]:
    """The pieces of one text, each written for people as it comes, behind the prompt."""
    for number, piece in enumerate(pieces):
        write_text(piece.text if number else _text_of(begun[0][0], model) + piece.text)
        yield piece
        if piece.ending:
            write_text("\n")


def _text_of(one: Given, model: LanguageModel) -> str:
    return one.text if isinstance(one.text, str) else model.decode(one.text)


def _whole_texts(pieces: Iterator[OutputChunk], *, num_samples: int) -> Iterator[tuple[OutputChunk, str]]:
    """(last piece, text) of each text, in the order of prompts and samples, whichever ends first."""
    texts: dict[tuple[int, int], str] = {}
    ended: dict[tuple[int, int], OutputChunk] = {}
    turn = (0, 0)
    for piece in pieces:
        key = piece.prompt, piece.sample
        texts[key] = texts.get(key, "") + piece.text
        if piece.ending:
            ended[key] = piece
        while turn in ended:
            yield ended.pop(turn), texts.pop(turn)
            turn = (turn[0], turn[1] + 1) if turn[1] + 1 < num_samples else (turn[0] + 1, 0)


@contextmanager
def _filling() -> Iterator[None]:
    """Raises ConfigError for an output that cannot be opened or is full."""
    try:
        yield
    except BrokenPipeError:  # its reader has what it wants
        raise
    except OSError as error:
        what = error.filename or "the texts"
        raise ConfigError(
            f"cannot write {what}: {error.strerror}. Make room, or name another file with --out."
        ) from error
