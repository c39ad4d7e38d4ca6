"""A folder with a manifest is complete or known to be damaged, and appears in one step or not at all."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from txl_dist.errors import CheckpointError
from txl_dist.io.manifest import (
    MANIFEST,
    check_folder,
    commit_folder,
    describe_file,
    files_of,
    problems_of,
    write_manifest,
)

CONTENT = {
    "state.json": b'{"step": 1200}\n',
    "engine/rank-0.pt": random.Random(0).randbytes(5000),
    "engine/rank-1.pt": random.Random(1).randbytes(300),
    "lanes/00000-00031.safetensors": bytes(1000),
    "empty.txt": b"",
}
FILES = [MANIFEST, *(name for name, content in CONTENT.items() if content)]


def write_content(folder: Path) -> None:
    for name, content in CONTENT.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_manifest(folder, {name: describe_file(folder / name) for name in files_of(folder)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "step_000001200"
    write_content(path)
    return path


def tree_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_written_folder_is_whole(folder: Path) -> None:
    assert problems_of(folder) == []
    check_folder(folder, remedy="")
    assert files_of(folder) == sorted(CONTENT)
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    assert {name: facts["bytes"] for name, facts in listed.items()} == {n: len(c) for n, c in CONTENT.items()}


def test_the_manifest_follows_from_the_files_alone(folder: Path) -> None:
    first = (folder / MANIFEST).read_bytes()
    write_manifest(folder, {name: describe_file(folder / name) for name in reversed(files_of(folder))})
    assert (folder / MANIFEST).read_bytes() == first


@pytest.mark.parametrize("share_pct", [0, 1, 50, 99])
@pytest.mark.parametrize("name", FILES)
def test_every_truncation_of_every_file_is_found_and_named(folder: Path, name: str, share_pct: int) -> None:
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) * share_pct // 100])
    problems = problems_of(folder)
    assert len(problems) == 1
    assert Path(name).name in problems[0]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_in_every_file_is_found_and_named(folder: Path, name: str) -> None:
    generator, whole = random.Random(name), (folder / name).read_bytes()
    # All bits of the small files and of the manifest's first and last bytes; a sample of the others.
    edges = [*range(16), *range(len(whole) - 16, len(whole))]
    positions = edges if len(whole) > 32 else range(len(whole))
    flips = [(position, bit) for position in positions if 0 <= position < len(whole) for bit in range(8)]
    flips += [(generator.randrange(len(whole)), generator.randrange(8)) for _ in range(200)]
    for position, bit in flips:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << bit
        (folder / name).write_bytes(damaged)
        problems = problems_of(folder)
        assert len(problems) == 1, (position, bit)
        assert Path(name).name in problems[0]
    (folder / name).write_bytes(whole)
    assert problems_of(folder) == []


@pytest.mark.parametrize("name", [MANIFEST, *CONTENT])
def test_a_missing_or_longer_file_is_found_and_named(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole + b"x")
    assert Path(name).name in problems_of(folder)[0]
    (folder / name).unlink()
    assert Path(name).name in problems_of(folder)[0]
    (folder / name).mkdir()
    assert Path(name).name in problems_of(folder)[0]


def test_all_damaged_files_are_listed(folder: Path) -> None:
    for name in ("state.json", "engine/rank-1.pt"):
        (folder / name).write_bytes(b"x")
    assert len(problems_of(folder)) == 2
    with pytest.raises(CheckpointError, match=r"is damaged: .*rank-1\.pt.*state\.json.*Use another one\."):
        check_folder(folder, remedy="Use another one.")


def test_a_manifest_of_another_format_or_of_no_sense_is_a_problem(folder: Path) -> None:
    for content in ("[]", "3", '"x"', "null", "{}", '{"self_sha256": 1}', "\xff", "[" * 5):
        (folder / MANIFEST).write_text(content, encoding="latin-1")
        assert MANIFEST in problems_of(folder)[0], content
    assert MANIFEST in problems_of(folder / "missing")[0]


def test_committing_moves_the_whole_folder_at_once(tmp_path: Path) -> None:
    temporary, final = tmp_path / "step_1.tmp-abc", tmp_path / "step_1"
    write_content(temporary)
    before = tree_of(temporary)
    commit_folder(temporary, final)
    assert tree_of(final) == before
    assert list(tmp_path.iterdir()) == [final]


def test_what_lies_in_the_way_is_moved_aside_and_never_deleted(tmp_path: Path) -> None:
    final = tmp_path / "step_1"
    for generation in range(3):
        temporary = tmp_path / f"step_1.tmp-{generation}"
        temporary.mkdir()
        (temporary / "generation").write_text(str(generation))
        commit_folder(temporary, final)
    kept = {path.name: (path / "generation").read_text() for path in tmp_path.iterdir()}
    assert kept == {"step_1": "2", "step_1.damaged-1": "0", "step_1.damaged-2": "1"}
