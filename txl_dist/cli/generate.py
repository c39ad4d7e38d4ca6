"""`txl generate`: check its flags before torch is imported, and choose the prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from txl_dist.artifacts import TRAINED, require
from txl_dist.cli.parsing import announce, local_source
from txl_dist.config.registry import load_plugins
from txl_dist.console.formatting import counted
from txl_dist.errors import ConfigError
from txl_dist.evaluation.options import check_output
from txl_dist.inference.options import InferencePrecision, SamplingParams, check_text

_PIPE = Path("-")
"""Path that means standard input or standard output."""


class _NotGiven(tuple[Any, ...]):
    """Type of the default value of a flag, which shows that the flag was not given.

    If a flag was given without values, its value is an empty plain tuple. The reason is probably an unset shell
    variable.
    """


_NOT_GIVEN = _NotGiven()


def generate(
    source: Positional[Path],
    /,
    writing: Annotated[SamplingParams, arg(name="")],
    prompt: tuple[str, ...] = _NOT_GIVEN,
    tokens: tuple[int, ...] = _NOT_GIVEN,
    file: Path | None = None,
    jsonl: Path | None = None,
    out: Path | None = None,
    load_memory: Path | None = None,
    save_memory: Path | None = None,
    device: str = "cpu",
    precision: InferencePrecision = "stored",
    plugins: tuple[str, ...] = (),
) -> None:
    """Continue prompts with a bundle, a run or a checkpoint. A single text is printed token by token.

    Args:
        source: Bundle, hf://OWNER/NAME, run directory (its newest whole checkpoint) or checkpoint folder.
        writing: Options of the generated texts.
        prompt: Texts to continue. Without any prompt a new document begins.
        tokens: Token ids to continue, used without changes.
        file: Text to continue, of any length. `-` is standard input.
        jsonl: Prompts, one per line, {"prompt": text} or {"tokens": [ids]}. `-` is standard input.
        out: Write the texts to this file, one JSON object per line. `-` is standard output.
        load_memory: Start from the memory in this file, which --save-memory wrote. The memory's text is not read again.
        save_memory: Write the model's memory after prompt and text to this file.
        device: Device of the model: cpu, cuda or, with several GPUs, cuda:1.
        precision: Number type of the computation. stored: that of the bundle's weights (fp32 for a run and for int8).
        plugins: Python modules to import first, which runs their code.
    """
    load_plugins(plugins)
    source = local_source(source)
    kind = require(source, *TRAINED)
    writing.check()
    _check_has_values("--prompt", prompt, "a text")
    _check_has_values("--tokens", tokens, "an id")
    _check_one_source(prompt=prompt, tokens=tokens, file=file, jsonl=jsonl)
    num_texts = writing.num_samples * max(1, len(prompt))
    is_one_text = num_texts == 1 and jsonl is None
    if save_memory is not None and not is_one_text:
        raise ConfigError("--save-memory saves the memory of a single text. Give one prompt, and --num-samples 1.")
    if writing.log_probs >= 0 and out is None:
        raise ConfigError(
            "--log-probs writes JSON and needs an output file. Give --out FILE, or --out - for standard output."
        )
    _check_memory_files(load_memory, save_memory)
    for path in (file, jsonl, load_memory):
        _check_exists(path)
    _check_writable("--out", out, read_paths=(file, jsonl))
    _check_writable("--save-memory", save_memory, read_paths=(file, jsonl))
    _check_not_a_memory(out, memories=(load_memory, save_memory))
    for text in prompt:
        check_text(text)
    limit = counted(writing.max_tokens, "token")
    announce(f"generating up to {limit} with {source}, {kind.value}; seed {writing.seed}")
    from txl_dist.cli.prompts import choose_prompts, generate_texts

    generate_texts(
        source,
        prompts=choose_prompts(prompt=prompt, tokens=tokens, file=file, jsonl=jsonl),
        is_one=is_one_text,
        writing=writing,
        out=out,
        load_memory=load_memory,
        save_memory=save_memory,
        device=device,
        precision=precision,
    )


def _check_has_values(flag: str, values: tuple[Any, ...], kind_of_value: str) -> None:
    """Refuse a flag that was given without values. Raises ConfigError."""
    if values or values is _NOT_GIVEN:
        return
    raise ConfigError(
        f"{flag} was given without {kind_of_value}. Write {kind_of_value} after {flag}. To generate a new document "
        f"without a prompt, remove {flag}."
    )


def _check_one_source(
    *, prompt: tuple[str, ...], tokens: tuple[int, ...], file: Path | None, jsonl: Path | None
) -> None:
    """Refuse prompts from more than one flag. Raises ConfigError."""
    is_given = {
        "--prompt": bool(prompt),
        "--tokens": bool(tokens),
        "--file": file is not None,
        "--jsonl": jsonl is not None,
    }
    flags = [flag for flag in is_given if is_given[flag]]
    if len(flags) > 1:
        raise ConfigError(
            f"{' and '.join(flags)} cannot be given together, because each of these flags gives prompts. Use only "
            "one of these flags."
        )


def _check_memory_files(load_memory: Path | None, save_memory: Path | None) -> None:
    """Refuse `-` (a pipe) as the file of a memory, and a path of --save-memory that exists but is not a file. Raises
    ConfigError."""
    if save_memory is not None and save_memory.exists() and not save_memory.is_file():
        raise ConfigError(f"cannot write {save_memory}: the path is not a file. Name another file with --save-memory.")
    if _PIPE in (load_memory, save_memory):
        raise ConfigError(
            "a memory must be in a file, not in a pipe (-). Name a file with --load-memory or --save-memory."
        )


def _check_exists(path: Path | None) -> None:
    """Refuse an input file that does not exist. Raises ConfigError."""
    if path is None or path == _PIPE:
        return
    if not path.exists():
        raise ConfigError(f"{path} does not exist. Name another file with --file, --jsonl or --load-memory.")


def _check_writable(flag: str, path: Path | None, *, read_paths: tuple[Path | None, ...]) -> None:
    """Refuse an output file that cannot be written, or that the prompts are read from. Raises ConfigError."""
    if path is None or path == _PIPE:
        return
    check_output(flag, path)
    if not path.exists():
        return
    for read_path in read_paths:
        if read_path is not None and read_path.exists() and path.samefile(read_path):
            raise ConfigError(f"{flag} {path} is also the file with the prompts. Name another file with {flag}.")


def _check_not_a_memory(out: Path | None, *, memories: tuple[Path | None, ...]) -> None:
    """Refuse an output file that is also the file of a memory. Raises ConfigError."""
    if out is None or out == _PIPE:
        return
    for memory in memories:
        if memory is not None and memory.resolve() == out.resolve():
            raise ConfigError(
                f"--out {out} is also the file of --load-memory or --save-memory. Name another file with --out."
            )
