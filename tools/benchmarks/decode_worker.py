"""Generates tokens when told to, for tools/benchmarks/decode.py: by any version of this project, or by transformers.

    decode_worker.py JOB.json     reads from a pipe lines "CASE TOKENS", and answers each when so many tokens are made

JOB has the model's settings, the folder of its weights where it is Hugging Face's, and the cases: rows, memory, and how
much was read before the first token. The first line asks for the log-probability of some tokens, which all must share.
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
    """Answer until the pipe is closed."""
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
    """What makes one more token of each row, of which the first has the id that it returns."""
    torch.manual_seed(1)
    ids = torch.randint(job["vocab_size"], (past,)).tolist()
    if "huggingface" in job:
        return huggingface(job["huggingface"], ids, memory=memory, segment_len=job["segment_len"])
    from txl_dist.config.schema import ModelSection
    from txl_dist.inference import generate
    from txl_dist.model.transformer_xl import TransformerXL

    module: Any = generate  # of any version
    torch.manual_seed(0)
    model = TransformerXL(ModelSection.model_validate(job["section"]), vocab_size=job["vocab_size"]).eval()
    lengths = {"memory_len": memory, "segment_len": job["segment_len"]}
    if not hasattr(module, "Decoder"):  # before there was one, a text was generated alone
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
    """Their own forward with its mems, a token at a time; the likeliest is taken."""
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
