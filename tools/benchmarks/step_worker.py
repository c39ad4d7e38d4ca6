"""Makes training steps when told to, for tools/benchmarks/step.py: by the checkout that is named, with its own tools.

    step_worker.py FOLDER SIZES.json    makes a step for each line of a pipe, and answers with its loss

SIZES has the model's settings and the other fields of `trainers.Sizes`. The segments are those of step.py.
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
    given = parser.parse_args()
    folder = given.folder.absolute()
    sys.path[:0] = [str(folder), str(folder / "tools")]

    import torch

    from txl_dist.config.schema import ModelSection

    # A checkout from before tools/ was divided into packages has trainers.py in tools/ itself.
    is_divided = (folder / "tools/benchmarks").is_dir()
    trainers = importlib.import_module("tools.benchmarks.trainers" if is_divided else "trainers")
    torch.set_num_threads(1)
    told = json.loads(given.sizes.read_text(encoding="utf-8"))
    sizes = trainers.Sizes(**told | {"model": ModelSection.model_validate(told["model"])})
    trainer = trainers.OurTrainer(sizes, attention="fused")
    segments = itertools.cycle(itertools.islice(trainers.zipf_segments(sizes, seed=1), 4))
    print("ready", flush=True)
    for _ in sys.stdin:
        print(float(trainer.step(next(segments))), flush=True)
