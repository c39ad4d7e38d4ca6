"""Messages about ranks that differ: which settings or plugins, and on which ranks."""

from __future__ import annotations

from txl_dist.config.registry import Plugin
from txl_dist.train.monitoring.alike import (
    SplitIdentity,
    code_problem,
    corpora_problem,
    plugin_problem,
    settings_problem,
)


def test_the_first_three_settings_that_differ_are_named_with_all_ranks_that_differ() -> None:
    first = {"train.max_steps": 9, "optim.lr": 0.1, "model.width": 8, "run.seed": 1, "train.objective": ""}
    other = {"train.max_steps": 9, "optim.lr": 0.2, "model.width": 16, "run.seed": 2, "train.objective": "x"}
    assert settings_problem([first, first, other, other, first, other]) == (
        "settings differ between ranks: optim.lr is 0.1 on rank 0, but 0.2 on rank 2; model.width is 8 on rank 0, but "
        "16 on rank 2; run.seed is 1 on rank 0, but 2 on rank 2; and 1 further setting. Rank 0 has other settings than "
        "ranks 2-3, 5. Start all nodes with the same configuration file and options."
    )


def test_a_rank_with_another_version_of_a_plugin_is_named() -> None:
    old, new = (Plugin("mine", version, "0123456789abcdef") for version in ("1.0", "1.1"))
    assert plugin_problem([(old,), (old,), (new,)]) == (
        "plugins differ between ranks: rank 0 has mine 1.0 (0123456789ab), but rank 2 has mine 1.1 (0123456789ab). "
        "Install the same version on every node."
    )
    assert plugin_problem([(old,), ()]).startswith("plugins differ between ranks: rank 0 has mine 1.0 (0123456789ab), ")


def test_equal_ranks_have_no_problem() -> None:
    assert settings_problem([{"optim.lr": 0.1}, {"optim.lr": 0.1}]) == ""
    assert plugin_problem([(), ()]) == ""
    assert code_problem(["torch 2.13.0", "torch 2.13.0"]) == ""


def test_ranks_with_other_code_are_named_with_both_versions() -> None:
    assert code_problem(["torch 2.13.0", "torch 2.13.0", "torch 2.12.1"]) == (
        "the code differs between ranks: rank 0 runs torch 2.13.0, but rank 2 runs torch 2.12.1. Install the same "
        "versions on every node."
    )


def test_the_first_split_of_other_content_is_named_with_both_folders() -> None:
    train, valid = SplitIdentity("0" * 64, "train", "data/a"), SplitIdentity("1" * 64, "valid", "data/a")
    copy, other = train._replace(path="copy/a"), train._replace(fingerprint="2" * 64, path="data/b")
    assert corpora_problem([[train, valid], [copy, valid]]) == ""
    assert corpora_problem([[train, valid], [copy, valid], [other, valid]]) == (
        "corpora differ between ranks: rank 0 reads the split train of data/a (fingerprint 000000000000), but rank 2 "
        "reads the split train of data/b (fingerprint 222222222222). Give every node the same corpora, in a shared "
        "folder or as copies."
    )
    assert "but rank 1 reads no corpus in its place" in corpora_problem([[train, valid], [train]])
