"""Generate tokens on request for tools/benchmarks/decode.py, with any version of this project or with transformers.

    decode_worker.py JOB.json     reads lines "CASE TOKENS" from standard input; answers after the tokens are generated

JOB.json contains the model's settings, optionally its number type (default float32), for Hugging Face the folder of the
weights, and the cases. A case has the number of rows, the memory length and the number of tokens that are read before
the first generated token. The worker prints `ready` first. Each answer is the id of the last token of the first row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    """Answer requests until standard input is closed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, metavar="JOB.json", help="written by decode.py")
    torch.set_num_threads(1)
    job = json.loads(parser.parse_args().job.read_text(encoding="utf-8"))
    steps = {name: stepper(job, **case) for name, case in job["cases"].items()}
    print("ready", flush=True)
    for line in sys.stdin:
        name, count = line.rsplit(maxsplit=1)
        for _ in range(int(count)):
            answer = steps[name]()
        print(answer, flush=True)


def stepper(job: dict[str, Any], *, rows: int, memory: int, past: int) -> Callable[[], object]:
    """Return a function that generates one more token of each row and returns the id of the first row's token."""
    torch.manual_seed(1)
    ids = torch.randint(job["vocab_size"], (past,)).tolist()
    if "huggingface" in job:
        return huggingface(job["huggingface"], ids, memory=memory, segment_len=job["segment_len"])
    from txl_dist.config.schema import ModelSection
    from txl_dist.inference import generate
    from txl_dist.model.transformer_xl import TransformerXL

    module: Any = generate  # the module of any version of this project
    torch.manual_seed(0)
    model = TransformerXL(ModelSection.model_validate(job["section"]), vocab_size=job["vocab_size"]).eval()
    model.to(getattr(torch, job.get("dtype", "float32")))
    lengths = {"memory_len": memory, "segment_len": job["segment_len"]}
    if not hasattr(module, "Decoder"):  # older versions have no Decoder and generate one text at a time
        assert rows == 1
        tokens = module.generate(model, ids, max_tokens=10**9, **lengths, **job["sampling"])
        return lambda: next(tokens)
    from txl_dist.inference.options import Sampling

    decoder, sampling = module.Decoder(model, **lengths), Sampling(**job["sampling"])
    for row in range(rows):
        decoder.add(row, module.Request(ids=tuple(ids), max_tokens=10**9, sampling=sampling, seed=row))
    return lambda: decoder.step()[0].id


@torch.no_grad()
def huggingface(folder: str, ids: Sequence[int], *, memory: int, segment_len: int) -> Callable[[], int]:
    """Return a function that generates the most likely next token with transformers' forward pass and its mems."""
    import transformers
    from transformers.models.deprecated.transfo_xl import TransfoXLLMHeadModel

    from tools.benchmarks.huggingface_theirs import type_as_a_type

    transformers.logging.set_verbosity_error()
    model = TransfoXLLMHeadModel.from_pretrained(folder).eval()
    model.transformer.reset_memory_length(memory)
    config = model.config
    state: dict[str, Any] = {"mems": [torch.zeros(0, 1, config.d_model) for _ in range(config.n_layer)]}

    @torch.no_grad()
    def read(tokens: Sequence[int]) -> int:
        with type_as_a_type():
            output = model(torch.tensor([list(tokens)]), mems=state["mems"], return_dict=True)
        state["mems"] = output.mems
        last = int(output.prediction_scores[0, -1].argmax())
        state["last"] = last
        return last

    for start in range(0, len(ids), segment_len):
        read(ids[start : start + segment_len])
    first: list[int] = [state["last"]]
    return lambda: first.pop() if first else read([state["last"]])


if __name__ == "__main__":
    main()
