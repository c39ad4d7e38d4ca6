"""Prompts and output of `txl generate`.

Prompts come from the command line, files and pipes. Texts are printed for people while they are generated, or written
as JSON lines.
"""

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
from txl_dist.inference.options import InferencePrecision, SamplingParams
from txl_dist.inference.scheduler import OutputChunk, Prompt
from txl_dist.inference.text_memory import TextMemory
from txl_dist.io.files import Record, open_text, parse_record, read_as_text

STANDARD = Path("-")
"""Path that means standard input or standard output."""


class PromptInput(NamedTuple):
    """One prompt as the user gave it, as text or as token ids."""

    text: Text
    record: dict[str, Any]
    """Fields that the output repeats with each text of this prompt."""
    where: str = ""
    """File and line of the prompt. Error messages begin with it."""


def generate_texts(
    source: Path,
    *,
    prompts: Iterable[PromptInput],
    is_one: bool,
    writing: SamplingParams,
    out: Path | None,
    load_memory: Path | None,
    save_memory: Path | None,
    device: str = "cpu",
    precision: InferencePrecision = "stored",
) -> None:
    """Generate texts with a run, a checkpoint or a bundle, and write them.

    The file `out` gets JSON lines. Without `out` the texts are printed for people. `is_one` says that there is only one
    text, which is printed while it is generated.

    Raises CheckpointError if the model or the memory cannot be read. Raises ConfigError for settings out of range, a
    missing device, files that cannot be written, and a prompt that cannot be used. The error for a prompt is raised
    after the texts of all earlier prompts are written.
    """
    start_logging()
    with _translate_write_errors(), ExitStack() as stack:
        model = load(source, device=device, precision=precision)
        if load_memory is None:
            memory = None
        else:
            memory = model.load_memory(load_memory)
        active: dict[int, tuple[PromptInput, Prompt]] = {}
        problems: list[ConfigError] = []
        started = _start_prompts(prompts, model, memory, active, problems)
        chunks = model.stream_batch(started, writing, keep_memory=save_memory is not None)
        stream: TextIO | None = None
        is_shown = is_one and out is None
        if is_shown:
            chunks = _show(chunks, model, active)
        for chunk, text in _whole_texts(chunks, num_samples=writing.num_samples):
            assert chunk.ending is not None
            is_last_sample = chunk.sample == writing.num_samples - 1
            prompt_input, prompt = active[chunk.prompt]
            if is_last_sample:
                del active[chunk.prompt]
            generation = model.generation(text, chunk.ending, prompt)
            if out is not None:
                if stream is None:  # not before: a prompt that is refused leaves an older file unchanged
                    stream = _open_output(out, stack)
                record = prompt_input.record | {
                    "sample": chunk.sample,
                    "text": text,
                    "finish": generation.finish,
                    "ids": generation.ids,
                }
                if writing.log_probs >= 0:
                    record |= {"log_probs": generation.log_probs, "top": generation.top}
                stream.write(json.dumps(record) + "\n")
                stream.flush()
            elif not is_shown:
                echo(f"--- prompt {chunk.prompt + 1}, sample {chunk.sample + 1}: {generation.finish}")
                write_text(_text_of(prompt_input, model) + text + "\n")
            if save_memory is not None and generation.memory is not None:
                generation.memory.save(save_memory)
        if problems:
            raise problems[0]


def _open_output(path: Path, stack: ExitStack) -> TextIO:
    """Open the file for the JSON lines. The exit stack `stack` closes the file. The path - means standard output."""
    if path == STANDARD:
        return sys.stdout
    return stack.enter_context(path.open("w", encoding="utf-8"))


_OUTPUT_FIELDS = ("sample", "text", "finish", "ids", "log_probs", "top")
"""Fields of an output line that are added to the fields of its prompt."""


def choose_prompts(
    *, prompt: tuple[str, ...], tokens: tuple[int, ...], file: Path | None, jsonl: Path | None
) -> Iterable[PromptInput]:
    """Return the prompts that one of the flags gives, or one empty prompt if no flag is given.

    A file is read only when its prompt is reached.
    """
    if jsonl is not None:
        return prompts_in_lines(read_lines(jsonl), where=str(jsonl))
    if file is not None:
        return _whole_text(file)
    if tokens:
        return [PromptInput(list(tokens), {"tokens": tokens})]
    texts = prompt or ("",)
    return [PromptInput(text, {"prompt": text}) for text in texts]


def _whole_text(path: Path) -> Iterator[PromptInput]:
    """Yield the text of a file as one prompt. Raises the same errors as `read_lines`."""
    text = "".join(read_lines(path))
    yield PromptInput(text, {"prompt": text})


def prompts_in_lines(lines: Iterable[str], *, where: str) -> Iterator[PromptInput]:
    """Yield the prompts in JSON lines: {"prompt": text} or {"tokens": [ids]}. Other fields are repeated in the output.

    Raises ConfigError, which names the line, for a line that is not JSON, for a line with none or both of these fields,
    and for a line with a field that the output would overwrite.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{where}, line {number}: "
        try:
            record = parse_record(line)
            json.dumps(record, allow_nan=False)  # the output will write it again
        except RecursionError as error:
            raise ConfigError(
                f"{place}this record is nested too deeply to be written to the output. Remove this record."
            ) from error
        except ValueError as error:
            raise ConfigError(f"{place}the line is not JSON ({error}). Correct the line.") from error
        if isinstance(record, Record):
            values = record
        else:
            values = Record()
        if values.repeated:
            raise ConfigError(f"{place}the record has {', '.join(sorted(values.repeated))} twice. Keep each key once.")
        texts = [values[key] for key in ("prompt", "tokens") if values.get(key) is not None]
        if len(texts) != 1 or not (isinstance(texts[0], str) or _is_list_of_ids(texts[0])):
            raise ConfigError(f'{place}the line must be an object with "prompt" (a text) or "tokens" (a list of ids).')
        taken = [key for key in _OUTPUT_FIELDS if values.get(key) is not None]
        if taken:
            raise ConfigError(
                f"{place}the record has values under the keys {', '.join(taken)}, which the output would overwrite. "
                "Use other keys for these values."
            )
        yield PromptInput(texts[0], record, place)


def _is_list_of_ids(value: object) -> bool:
    """Return True if a JSON value is a list of whole numbers."""
    if not isinstance(value, list):
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file or of standard input.

    Raises ConfigError if the input cannot be read, or is not UTF-8.
    """
    try:
        if path == STANDARD:
            if sys.stdin is None:
                raise ConfigError("standard input is closed. Name a file of prompts in place of -.")
            if isinstance(sys.stdin, TextIOWrapper):
                read_as_text(sys.stdin)
            yield from sys.stdin
            return
        with open_text(path) as stream:
            yield from stream
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Name another file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid UTF-8 (byte {error.start}). Convert the file to UTF-8.") from error


def _start_prompts(
    prompts: Iterable[PromptInput],
    model: LanguageModel,
    memory: TextMemory | None,
    active: dict[int, tuple[PromptInput, Prompt]],
    problems: list[ConfigError],
) -> Iterator[Prompt]:
    """Yield the prompts one by one, and enter each prompt in `active` by its number.

    The first prompt that cannot be used ends the generator. Its error is added to `problems`, because the texts of the
    active prompts are written first.
    """
    where = ""
    try:
        for number, prompt_input in enumerate(prompts):
            where = prompt_input.where
            prompt = model.prompt(prompt_input.text, memory)
            active[number] = prompt_input, prompt
            where = ""
            yield prompt
    except TxlError as error:
        problems.append(ConfigError(f"{where}{error}"))


def _show(
    chunks: Iterable[OutputChunk], model: LanguageModel, active: dict[int, tuple[PromptInput, Prompt]]
) -> Iterator[OutputChunk]:
    """Yield the chunks of one text unchanged, and print the prompt and then each chunk for people."""
    is_first = True
    for chunk in chunks:
        if is_first:
            prompt_input, _ = active[0]
            write_text(_text_of(prompt_input, model) + chunk.text)
            is_first = False
        else:
            write_text(chunk.text)
        yield chunk
        if chunk.ending:
            write_text("\n")


def _text_of(prompt: PromptInput, model: LanguageModel) -> str:
    """Return the text of a prompt. A prompt that was given as ids is decoded."""
    if isinstance(prompt.text, str):
        return prompt.text
    return model.decode(prompt.text)


def _whole_texts(chunks: Iterator[OutputChunk], *, num_samples: int) -> Iterator[tuple[OutputChunk, str]]:
    """Yield (last chunk, whole text) of each sample, in the order of prompts and samples, even if a later sample ends
    first."""
    texts: dict[tuple[int, int], str] = {}
    last_chunks: dict[tuple[int, int], OutputChunk] = {}
    prompt = 0
    sample = 0
    for chunk in chunks:
        key = chunk.prompt, chunk.sample
        texts[key] = texts.get(key, "") + chunk.text
        if chunk.ending:
            last_chunks[key] = chunk
        while (prompt, sample) in last_chunks:
            yield last_chunks.pop((prompt, sample)), texts.pop((prompt, sample))
            sample += 1
            if sample == num_samples:
                prompt = prompt + 1
                sample = 0


@contextmanager
def _translate_write_errors() -> Iterator[None]:
    """Raise ConfigError if the output cannot be opened, or if its disk is full."""
    try:
        yield
    except BrokenPipeError:  # the reader has stopped reading on purpose
        raise
    except OSError as error:
        what = error.filename or "the texts"
        raise ConfigError(
            f"cannot write {what}: {error.strerror}. If the disk is full, free disk space. Otherwise name another file "
            "with --out."
        ) from error
