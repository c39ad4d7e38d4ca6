"""Written tensor files can be read by the library, their hash is the file's, and slices equal the written tensors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from txl_dist.io.tensor_files import Stream, TensorFile, file_bytes, write_streams, write_tensors


def tensors_of_all_kinds() -> dict[str, Tensor]:
    """Every type that is saved, in an order that would break alignment, with odd sizes and empty ones."""
    generator = torch.Generator().manual_seed(0)
    return {
        "half odd": torch.randn(7, generator=generator).half(),
        "brain odd": torch.randn(3, 5, generator=generator).bfloat16(),
        "empty": torch.empty(0),
        "empty too": torch.empty(2, 0, 3, dtype=torch.int64),
        "scalar": torch.tensor(2.5),
        "single": torch.randn(1001, generator=generator),
        "long": torch.randint(-(2**62), 2**62, (13, 3), generator=generator),
        "view": torch.randn(40, generator=generator)[3:20],
        'a "name" \u00e9 with/marks': torch.full((2,), float("nan")),
    }


def written(path: Path, tensors: dict[str, Tensor], **metadata: str) -> dict[str, int | str]:
    return write_tensors(path, tensors, metadata=metadata)


def test_the_library_reads_back_every_bit_of_every_type(tmp_path: Path) -> None:
    tensors = tensors_of_all_kinds()
    written(tmp_path / "f", tensors)
    found = load_file(tmp_path / "f")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes_of(found[name]) == bytes_of(tensor), name


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("tensors", [tensors_of_all_kinds(), {}, {"empty": torch.empty(0)}])
def test_bytes_and_hash_are_those_of_the_file_and_no_more_than_announced(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    facts = written(tmp_path / "f", tensors, note="x")
    content = (tmp_path / "f").read_bytes()
    assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert len(content) <= file_bytes(tensors)


def test_a_tensor_larger_than_a_chunk_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txl_dist.io.tensor_files._CHUNK_BYTES", 1000)
    tensor = torch.arange(12_345, dtype=torch.int64)
    facts = written(tmp_path / "f", {"large": tensor})
    assert torch.equal(load_file(tmp_path / "f")["large"], tensor)
    assert facts["sha256"] == hashlib.sha256((tmp_path / "f").read_bytes()).hexdigest()


def test_every_tensor_begins_at_a_multiple_of_the_size_of_its_type(tmp_path: Path) -> None:
    tensors = tensors_of_all_kinds()
    written(tmp_path / "f", tensors)
    content = (tmp_path / "f").read_bytes()
    header_len = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_len])
    for name, tensor in tensors.items():
        start, end = header[name]["data_offsets"]
        assert (8 + header_len + start) % tensor.element_size() == 0, name
        assert end - start == tensor.nbytes


def test_slices_of_any_type_are_those_of_the_tensor(tmp_path: Path) -> None:
    tensors = tensors_of_all_kinds()
    written(tmp_path / "f", tensors, note="x")
    file = TensorFile(tmp_path / "f")
    assert file.metadata == {"note": "x"}
    assert file.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        for start, stop in {(0, flat.numel()), (flat.numel() // 3, flat.numel() // 2), (0, 0)}:
            assert bytes_of(file.read(name, start, stop)) == bytes_of(flat[start:stop]), name


def test_a_tensor_may_come_in_pieces(tmp_path: Path) -> None:
    whole = torch.arange(20, dtype=torch.int8).view(5, 4)
    stream = Stream(whole.dtype, whole.shape, (whole[i : i + 2] for i in (0, 2, 4)))
    facts = write_streams(tmp_path / "f", {"codes": stream, "other": Stream(torch.float32, torch.Size([0]), ())})
    assert torch.equal(load_file(tmp_path / "f")["codes"], whole)
    assert facts["sha256"] == hashlib.sha256((tmp_path / "f").read_bytes()).hexdigest()


def test_what_is_no_file_of_tensors_or_of_types_that_we_write_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"no tensors")
    with pytest.raises(SafetensorError):
        TensorFile(tmp_path / "f")
    with pytest.raises(OSError, match="No such file"):
        TensorFile(tmp_path / "nothing")
    save_file({"a": torch.zeros(3, dtype=torch.float64)}, tmp_path / "f")
    with pytest.raises(ValueError, match="a is of type F64"):
        TensorFile(tmp_path / "f").read("a", 0, 1)
    written(tmp_path / "f", {"a": torch.zeros(1000)})
    file = TensorFile(tmp_path / "f")
    with pytest.raises(ValueError, match="a has 1000 values, but 1001 values are needed"):
        file.read("a", 0, 1001)
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-8])
    with pytest.raises(OSError, match="ends early"):
        file.read("a", 0, 1000)
