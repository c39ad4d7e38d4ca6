"""Runs with document masks: older runs, whose first tokens were not scored, are not mixed with new ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.jobs import job_of
from txl_dist.config.load import load_config
from txl_dist.convert.export import export_bundle
from txl_dist.distributed.collectives import RankInfo
from txl_dist.errors import CheckpointError
from txl_dist.inference.bundle import load_bundle
from txl_dist.io.manifest import MANIFEST, describe_file, files_of, write_manifest
from txl_dist.tokenizers.tokenizer import load_tokenizer
from txl_dist.train.checkpoint.read import check_checkpoint
from txl_dist.train.checkpoint.validate import read_state

CHECKPOINT = Path(__file__).parents[2] / "golden" / "checkpoint_v2" / "step_000000016"


def with_masks(folder: Path, *, is_old: bool) -> Path:
    """The golden checkpoint, as if it had been trained with document masks, by a program of before or of today."""
    shutil.copytree(CHECKPOINT, folder)
    config, state = folder / "config.toml", folder / "state.json"
    config.write_text(config.read_text().replace('document_border = "carry"', 'document_border = "mask"'))
    state.write_text(json.dumps(json.loads(state.read_text()) | ({} if is_old else {"scores_first_tokens": True})))
    (folder / MANIFEST).unlink()
    write_manifest(folder, {name: describe_file(folder / name) for name in files_of(folder)})
    return folder


def check(folder: Path) -> list[str]:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    ranks = RankInfo(0, 2, 0, torch.device("cpu"), num_threads=1)
    return check_checkpoint(read_state(folder), job_of(load_config(folder / "config.toml"), ranks, tokenizer=tokenizer))


def test_a_masked_run_of_before_is_refused_with_the_reason_and_one_of_today_goes_on(tmp_path: Path) -> None:
    old, new = (with_masks(tmp_path / name, is_old=name == "old") for name in ("old", "new"))
    with pytest.raises(
        CheckpointError, match=r"did not score the first token of a document.*txl export .*--init BUNDLE"
    ):
        check(old)
    assert check(new) == check(CHECKPOINT) == []


def test_the_bundle_of_a_masked_run_of_before_does_not_begin_documents(tmp_path: Path) -> None:
    for is_old in (True, False):
        folder = with_masks(tmp_path / f"checkpoint{is_old}", is_old=is_old)
        export_bundle(folder, tmp_path / f"bundle{is_old}")
        assert load_bundle(tmp_path / f"bundle{is_old}").begins_documents != is_old
    export_bundle(tmp_path / "bundleTrue", tmp_path / "again")
    assert not load_bundle(tmp_path / "again").begins_documents
