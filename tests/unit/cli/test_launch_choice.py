"""Wrong values of the flags that choose machines and slots give one line with exit code 2, and start nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from txl_dist.cli.launch import _chosen, _with_spares
from txl_dist.cli.main import main

HOSTFILE = "node1 slots=2\nnode2 slots=4\n"
WRONG = [
    ("--include localhost:", "are not slot numbers. Separate slot numbers"),
    ("--include nohost:0", "no machine is called 'nohost'. Did you mean localhost"),
    ("--exclude localhost:x", "'x' are not slot numbers"),
    ("--exclude localhost", "leaves no rank"),
    ("--include localhost:0:1", "'0:1' are not slot numbers"),
    ("--include=", "--include needs the names of machines"),
    ("--exclude @", "no machine is called ''"),
    ("--include localhost:999", "localhost has no slot 999"),
    ("--hostfile hosts --include node3", "no machine is called 'node3'. Did you mean node1 or node2"),
    ("--hostfile hosts --include node2:0,4", "node2 has no slot 4, only slots 0 to 3"),
    ("--hostfile hosts --exclude node1@node2", "leaves no rank"),
    ("--hostfile hosts --exclude node2:0-1", "'0-1' are not slot numbers"),
    ("--hostfile hosts --include node1:-1", "'-1' are not slot numbers"),
    ("--hostfile hosts --include node1,node2", "no machine is called 'node1,node2'"),
    ("--hostfile hosts --include localhost:0", "Known machines: node1, node2"),
    ("--hostfile none --include node1", "--hostfile none: No such file"),
    ("--hostfile empty_slots --include node1", "line 1 gives node1 no slots"),
    ("--hostfile hosts --launcher psdh", "Did you mean pdsh"),
    ("--hostfile hosts --no_ssh --node_rank 2", "--no_ssh needs --node_rank, the number of this machine: 0 to 1"),
    ("--log_level loud", "it can be debug, info"),
    ("--spares 2", "--spares needs 0 or 1, the number of spare processes per node, not '2'"),
    ("--spares", "not ''"),
    ("--spare-nodes x", "--spare-nodes needs the number of spare nodes at the end of the hostfile, not 'x'"),
    ("--spares 1 --spares 0", "--spares is given several times"),
    ("--spares 1 --spare-nodes 1", "recover.spare_nodes=1 needs a hostfile"),
    ("--hostfile hosts --spares 1 --spare-nodes 2", "recover.spare_nodes=2 leaves none of 2 nodes for ranks"),
    ("--hostfile hosts --spares 1 --spare-nodes 1", "needs the same number of slots on every node of the hostfile"),
]


@pytest.mark.parametrize(("flags", "said"), WRONG)
def test_a_wrong_choice_is_refused_in_one_line(
    flags: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("txl_dist.launcher.launch.launch_ranks", lambda *words, **rest: pytest.fail("it was started"))
    monkeypatch.setattr("txl_dist.cli.main.check_paths", lambda *words, **rest: None)
    monkeypatch.setattr("txl_dist.train.engine.devices.count_devices", lambda: 8)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    Path("hosts").write_text(HOSTFILE)
    Path("empty_slots").write_text("node1 slots=0\n")
    Path("c.toml").touch()
    assert main(["launch", *flags.split(), "c.toml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.parametrize(
    "words",
    [
        "-i node1",
        "-i node2:0,2",
        "-i node1@node2:1",
        "-i node1:0@node1:1",
        "-i node2@node1",
        "-e node1",
        "-e node2:1,3",
    ],
)
def test_the_ranks_are_those_that_deepspeed_would_start(words: str) -> None:
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    flag, value = words.split()
    include, exclude = (value, "") if flag == "-i" else ("", value)
    theirs = parse_inclusion_exclusion({"node1": 2, "node2": 4}, include, exclude)
    ours = _chosen(argparse.Namespace(include=include, exclude=exclude), {"node1": 2, "node2": 4})
    assert ours == theirs
    assert list(ours) == list(theirs), "the first machine has rank 0"


@pytest.mark.parametrize("flag", [["--spares", "1"], ["--spares=1"]])
def test_spares_become_a_setting_of_the_ranks(flag: list[str]) -> None:
    words = _with_spares(["--num_gpus", "2", *flag, "c.toml", "--run.dir", "r"])
    assert words == ["--num_gpus", "2", "c.toml", "--run.dir", "r", "--recover.spares", "1"]


def test_spare_nodes_become_a_setting_of_the_ranks() -> None:
    words = _with_spares(["--spares", "1", "--spare-nodes", "2", "c.toml"])
    assert words == ["c.toml", "--recover.spares", "1", "--recover.spare_nodes", "2"]


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--spares 1", "--recover.spares 0"),
        ("--spares=0", "--recover.spares=1"),
        ("--spare-nodes 2", "--recover.spare_nodes 1"),
        ("--spare-nodes 2", "--recover.spare-nodes=0"),
    ],
)
def test_a_flag_that_contradicts_its_setting_is_refused_with_both_names(
    flag: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *flag.split(), "c.toml", *setting.split()]) == 2
    said = capsys.readouterr().err
    for word in (flag.replace("=", " "), setting.replace("=", " ").replace("spare-n", "spare_n"), "contradict"):
        assert word in said


@pytest.mark.parametrize("setting", ["--recover.spares 1", "--recover.spares 0 --recover.spares 1"])
def test_a_flag_and_a_setting_of_the_same_value_are_allowed(setting: str) -> None:
    words = _with_spares(["--spares", "1", "c.toml", *setting.split()])
    assert words == ["c.toml", *setting.split(), "--recover.spares", "1"]


def test_without_spares_the_words_stay_as_they_are() -> None:
    words = ["--num_gpus", "2", "c.toml", "--spares", "kept for the ranks to refuse"]
    assert _with_spares(words) == words
