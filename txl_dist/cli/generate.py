"""`txl generate`."""

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
from txl_dist.inference.options import SamplingParams, check_text


class _NotGiven(tuple[Any, ...]):
    """Default of a flag that was not given, which is not the same as one without values: a variable that was unset."""


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
    plugins: tuple[str, ...] = (),
) -> None:
    """Continue prompts with a bundle, a run or a checkpoint; one text is shown as it is made.

    Args:
        source: Bundle, hf://OWNER/NAME, run directory (its newest whole checkpoint) or checkpoint folder.
        writing: How texts are generated.
        prompt: Texts to continue; without any, and without ids or a file, a document is begun.
        tokens: Ids of a text to continue, taken as they are.
        file: Text to continue, of any length; - is standard input.
        jsonl: Prompts, one in a line, {"prompt": text} or {"tokens": [ids]}; - is standard input.
        out: Write the texts to this file, a JSON object in a line; - is standard output.
        load_memory: Go on from this memory, which --save-memory wrote: its text is not read again.
        save_memory: Write what is remembered of the prompt and the text to this file.
        device: Where the model runs: cpu, cuda or, of several GPUs, cuda:1.
        plugins: Modules to import first, which runs their code; for what was made with plugins.
    """
    load_plugins(plugins)
    source = local_source(source)
    kind = require(source, *TRAINED)
    writing.check()
    for flag, values, kind_of_value in (("--prompt", prompt, "a text"), ("--tokens", tokens, "an id")):
        if not values and values is not _NOT_GIVEN:
            raise ConfigError(
                f"{flag} needs {kind_of_value} or more. Leave it out, or give --prompt '', for a new document."
            )
    sources = {"--prompt": bool(prompt), "--tokens": bool(tokens), "--file": file is not None}
    named = [name for name, is_given in {**sources, "--jsonl": jsonl is not None}.items() if is_given]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} both give prompts. Give one of them.")
    num_texts = writing.num_samples * max(1, len(prompt))
    if save_memory is not None and (num_texts > 1 or jsonl is not None):
        raise ConfigError("--save-memory keeps the memory of one text. Give one prompt, and one sample.")
    if writing.log_probs >= 0 and out is None:
        raise ConfigError("--log-probs are told as JSON. Give --out FILE; --out - is standard output.")
    pipe = Path("-")
    if save_memory is not None and save_memory.exists() and not save_memory.is_file():
        raise ConfigError(f"cannot write {save_memory}: it is no file. Name another one with --save-memory.")
    if pipe in (load_memory, save_memory):
        raise ConfigError("a memory is a file, and - is none. Name one with --load-memory or --save-memory.")
    for path in (file, jsonl, load_memory):
        if path is not None and path != pipe and not path.exists():
            raise ConfigError(f"{path} does not exist. Name another file.")
    for flag, path in {"--out": out, "--save-memory": save_memory}.items():
        if path is None or path == pipe:
            continue
        check_output(flag, path)
        if path.exists() and any(read.exists() and path.samefile(read) for read in (file, jsonl) if read):
            raise ConfigError(f"{flag} {path} is the file of the prompts. Name another one.")
    if (
        out is not None
        and out != pipe
        and out.resolve() in [one.resolve() for one in (load_memory, save_memory) if one]
    ):
        raise ConfigError(f"--out {out} is the file of a memory. Name another one.")
    for text in prompt:
        check_text(text)
    announce(
        f"generating up to {counted(writing.max_tokens, 'token')} with {source}, {kind.value}; seed {writing.seed}"
    )
    from txl_dist.cli.prompts import Given, generate_texts, prompts_in_lines, read_lines

    if jsonl is not None:
        given = prompts_in_lines(read_lines(jsonl), where=str(jsonl))
    elif file is not None:
        given = (Given(text, {"prompt": text}) for text in ("".join(read_lines(path)) for path in [file]))
    elif tokens:
        given = iter([Given(list(tokens), {"tokens": tokens})])
    else:
        given = iter([Given(text, {"prompt": text}) for text in prompt or ("",)])
    generate_texts(
        source,
        given=given,
        is_one=num_texts == 1 and jsonl is None,
        writing=writing,
        out=out,
        load_memory=load_memory,
        save_memory=save_memory,
        device=device,
    )
