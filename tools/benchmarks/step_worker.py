"""Make training steps on request for tools/benchmarks/step.py, with the code and the tools of a given checkout.

    step_worker.py FOLDER SIZES.json    makes a step for each line of standard input, and prints its loss

SIZES.json contains the model's settings and the other fields of `trainers.Sizes`. The segments are those of step.py.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="checkout that makes the steps")
    parser.add_argument("sizes", type=Path, metavar="SIZES.json", help="written by step.py")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    sys.path[:0] = [str(folder), str(folder / "tools")]

    import torch

    from txl_dist.config.schema import ModelSection

    # In older checkouts, before tools/ was divided into packages, trainers.py is in tools/ itself.
    is_divided = (folder / "tools/benchmarks").is_dir()
    trainers = importlib.import_module("tools.benchmarks.trainers" if is_divided else "trainers")
    torch.set_num_threads(1)
    told = json.loads(arguments.sizes.read_text(encoding="utf-8"))
    sizes = trainers.Sizes(**told | {"model": ModelSection.model_validate(told["model"])})
    trainer = trainers.OurTrainer(sizes, attention="fused")
    segments = itertools.cycle(itertools.islice(trainers.zipf_segments(sizes, seed=1), 4))
    print("ready", flush=True)
    for _ in sys.stdin:
        print(float(trainer.step(next(segments))), flush=True)
