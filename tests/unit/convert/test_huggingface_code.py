"""The exported code computes the same as the bundle, and transformers can generate with it."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.bundles import MEMORY_LEN, SEGMENT_LEN, make
from tests.helpers.models import VARIANTS
from txl_dist.artifacts import ArtifactKind, detect_artifact
from txl_dist.convert.huggingface_export import export_huggingface_code
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.inference.bundle import load_bundle
from txl_dist.inference.language_model import LanguageModel
from txl_dist.io.manifest import problems_of

ALL: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "window": {"same_length": "memory", "clamp_len": 10},
    "window_and_self": {"same_length": "memory_and_self", "cutoffs": (40, 90), "div_value": 2},
    "untied": {"tie_weights": False, "cutoffs": (40,), "embed_width": 6},
    "no_projection": {"cutoffs": (40,), "div_value": 2, "project_same_width": False},
    "short_memory": {"memory_len": 3},
    "no_memory": {"memory_len": 0},
    "only_itself": {"memory_len": 0, "same_length": "memory_and_self"},
}
TEXT = "abcd dcba abba " * 8
TOLERANCE = 1e-4


class Taken:
    """A random model: here, and as transformers has it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.lm = LanguageModel(load_bundle(make(folder / "made", **settings).bundle))
        self.folder = folder / "taken"
        self.written = export_huggingface_code(self.folder, self.lm.bundle)
        from txl_dist.convert.huggingface_code.modeling_txl import TxlForCausalLM

        self.model = TxlForCausalLM.from_pretrained(self.folder).eval()

    def ids(self, text: str) -> list[int]:
        return list(self.lm.prompt(text).ids)

    @torch.no_grad()
    def scores(self, ids: list[int], memory: Any = None, **more: Any) -> Tensor:
        """Log-probabilities of all but the first token."""
        logits = self.model(torch.tensor([ids]), past_key_values=memory, **more).logits[0, :-1]
        return logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    def generated(self, *prompts: str, **settings: Any) -> list[list[int]]:
        """What follows each prompt, all in one batch that is padded on the left."""
        rows = [self.ids(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        made = self.model.generate(padded, attention_mask=mask, do_sample=False, **settings)
        return [row[longest:].tolist() for row in made]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Taken:
    pytest.importorskip("transformers", minversion="5")
    return Taken(tmp_path_factory.mktemp("taken"), cutoffs=(40, 90))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_five_segments_and_greedy_texts_are_those_of_the_bundle(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    taken = Taken(tmp_path, **ALL[name])
    ids = taken.ids(TEXT)[: 5 * SEGMENT_LEN + 6]
    assert (taken.scores(ids) - taken.lm.score(ids)).abs().max() < TOLERANCE
    assert taken.written.difference is not None
    assert taken.written.difference < TOLERANCE
    assert taken.written.has_tokenizer
    prompts = ["ab", TEXT[:60], TEXT[3:100]]  # of less, and of more, than is remembered
    ours = [taken.lm.generate(prompt, max_tokens=40, temperature=0.0).ids for prompt in prompts]
    end = taken.lm.tokenizer.end_of_text
    theirs = [[i for i in made if i != end] for made in taken.generated(*prompts, max_new_tokens=40)]
    assert theirs == [[i for i in made if i != end] for made in ours]


@pytest.mark.slow
def test_rows_of_a_padded_batch_are_what_they_are_alone(taken: Taken) -> None:
    rows = [taken.ids(TEXT[: 5 * length]) for length in (2, 9, 17)]
    longest = max(map(len, rows))
    for side in ("left", "right"):
        fill = [[0] * (longest - len(row)) for row in rows]
        padded = [zeros + row if side == "left" else row + zeros for zeros, row in zip(fill, rows, strict=True)]
        ones = [[1] * len(row) for row in rows]
        mask = [zeros + row if side == "left" else row + zeros for zeros, row in zip(fill, ones, strict=True)]
        with torch.no_grad():
            logits = taken.model(torch.tensor(padded), attention_mask=torch.tensor(mask)).logits
            for row, zeros, found in zip(rows, fill, logits, strict=True):
                alone = taken.model(torch.tensor([row])).logits[0]
                mine = found[len(zeros) :] if side == "left" else found[: len(row)]
                assert (mine - alone).abs().max() < 1e-5


@pytest.mark.slow
def test_a_beam_takes_its_memory_along(taken: Taken) -> None:
    ids = taken.ids("abcd dcba")
    made = taken.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=12,
        do_sample=False,
        length_penalty=0.0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for row, score in zip(made.sequences.tolist(), made.sequences_scores.tolist(), strict=True):
        assert float(taken.scores(row)[len(ids) - 1 :].sum()) == pytest.approx(score, abs=1e-3)


@pytest.mark.slow
def test_a_memory_goes_on_as_often_as_one_likes_and_can_be_longer_than_in_training(taken: Taken) -> None:
    from txl_dist.convert.huggingface_code.modeling_txl import TxlMemory

    ids = taken.ids(TEXT)[:100]
    memory = TxlMemory(taken.model.config, memory_len=60)
    taken.scores(ids[:50], memory)
    assert memory.get_seq_length() == 50
    again = copy.deepcopy(memory)
    with torch.no_grad():
        first, second = (taken.model(torch.tensor([ids[50:]]), past_key_values=one).logits for one in (memory, again))
    assert torch.equal(first, second)
    expected = taken.lm.score(ids, memory_len=60)
    # From token 50 on segments begin elsewhere, but up to token 60 nothing has left the memory.
    found = first[0, :9].gather(1, torch.tensor(ids[51:60])[:, None])[:, 0]
    assert (found - expected[50:59]).abs().max() < TOLERANCE
    whole = taken.scores(ids, TxlMemory(taken.model.config, memory_len=60))
    assert (whole - expected).abs().max() < TOLERANCE
    assert [layer.keys.shape[2] for layer in memory.layers] == [60] * len(memory.layers)


@pytest.mark.slow
def test_a_conversation_goes_on_from_its_memory(taken: Taken) -> None:
    """As ours does, which reads no more of a turn than its last token and the next prompt."""
    first = taken.lm.generate(TEXT[:50], max_tokens=20, temperature=0.0, keep_memory=True)
    second = taken.lm.generate("dcba abcd", memory=first.memory, max_tokens=20, temperature=0.0)
    assert {first.finish, second.finish} == {"length"}
    ids = torch.tensor([taken.ids(TEXT[:50])])
    settings = {"do_sample": False, "max_new_tokens": 20, "return_dict_in_generate": True}
    turn = taken.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert turn.sequences[0, ids.shape[1] :].tolist() == first.ids
    more = torch.cat([turn.sequences, torch.tensor([taken.lm.encode("dcba abcd")])], dim=1)
    mask, seen = torch.ones_like(more), turn.past_key_values.get_seq_length()
    assert seen == turn.sequences.shape[1] - 1
    turn = taken.model.generate(more, attention_mask=mask, past_key_values=turn.past_key_values, **settings)
    assert turn.sequences[0, more.shape[1] :].tolist() == second.ids


@pytest.mark.slow
def test_a_memory_of_zeros_is_that_of_the_peers(taken: Taken) -> None:
    ids = taken.ids(TEXT)[:50]
    found = taken.scores(ids, taken.model.zero_memory(1, MEMORY_LEN))
    assert (found - taken.lm.score(ids, zero_memory=True)).abs().max() < TOLERANCE
    assert (found - taken.lm.score(ids)).abs().max() > 1e-3


@pytest.mark.slow
def test_with_document_masks_a_token_sees_its_own_document(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    taken = Taken(tmp_path, document_mask=True)
    first, second = taken.ids("abcd dcb"), taken.ids("bbb acd")
    both = taken.scores([*first, *second])
    assert (both[len(first) :] - taken.scores(second)).abs().max() < 1e-5


@pytest.mark.slow
def test_the_loss_is_that_of_the_labels_and_its_gradient_reaches_every_weight(taken: Taken) -> None:
    ids = torch.tensor([taken.ids(TEXT)[:SEGMENT_LEN], taken.ids(TEXT)[1 : SEGMENT_LEN + 1]])
    labels = ids.masked_fill(torch.arange(SEGMENT_LEN) < 4, -100)
    output = taken.model(ids, labels=labels)
    expected = -output.logits[:, :-1].gather(2, ids[:, 1:, None])[:, 3:, 0].mean()
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-6)
    model = copy.deepcopy(taken.model)
    model(ids, labels=labels).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    hidden = taken.model(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == taken.model.config.num_hidden_layers + 1


@pytest.mark.slow
def test_what_cannot_be_exact_is_refused(taken: Taken) -> None:
    from transformers import DynamicCache

    ids = torch.tensor([taken.ids("abcd")] * 2)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="prompts that are padded on the left"):
        taken.model.generate(ids, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(ValueError, match="must be a TxlMemory"):
        taken.model(ids, past_key_values=DynamicCache())
    with pytest.raises(IndexError):
        taken.model(ids + taken.model.config.vocab_size)
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        taken.model(ids, use_cache=True).past_key_values.crop(-1)


ELSEWHERE = """
import json, sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "txl_dist":
            raise ImportError(name)
sys.meta_path.insert(0, Nowhere())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
folder, again = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
batch = tokenizer(["ab", "abcd dcba abba"], return_tensors="pt", padding=True)
made = model.generate(**batch, max_new_tokens=12, do_sample=False)
drawn = model.generate(**batch, max_new_tokens=3, do_sample=True, num_return_sequences=3)
model.save_pretrained(again)
tokenizer.save_pretrained(again)
second = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
pipe = pipeline("text-generation", model=again, trust_remote_code=True)
print(json.dumps({
    "ids": [row[mask == 1].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"])],
    "made": made[:, batch["input_ids"].shape[1]:].tolist(),
    "drawn": list(drawn.shape),
    "same": torch.equal(model(**batch).logits, second(**batch).logits),
    "text": pipe("ab", max_new_tokens=12, do_sample=False)[0]["generated_text"],
    "ours": "txl_dist" in sys.modules,
}))
"""


@pytest.mark.slow
def test_a_process_without_txl_dist_loads_generates_and_saves_it(taken: Taken, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ELSEWHERE, str(taken.folder), str(tmp_path / "again")]
    environment = {"HF_HOME": str(tmp_path / "home"), "PATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    prompts = ["ab", "abcd dcba abba"]
    ours = [taken.lm.generate(prompt, max_tokens=12, temperature=0.0) for prompt in prompts]
    end = taken.lm.tokenizer.end_of_text
    assert said["ids"] == [taken.ids(prompt) for prompt in prompts]
    assert [[i for i in row if i != end] for row in said["made"]] == [[i for i in one.ids if i != end] for one in ours]
    assert said["drawn"] == [6, len(taken.ids(prompts[1])) + 3]
    assert said["same"]
    assert not said["ours"]
    assert said["text"].startswith("ab")


@pytest.mark.slow
def test_the_folder_is_whole_and_replaces_only_its_own_kind(taken: Taken, tmp_path: Path) -> None:
    assert detect_artifact(taken.folder) is ArtifactKind.HUGGINGFACE_CODE
    assert problems_of(taken.folder) == []
    export_huggingface_code(taken.folder, taken.lm.bundle)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "novel.txt").touch()
    with pytest.raises(CheckpointError, match="exists and is not"):
        export_huggingface_code(tmp_path / "mine", taken.lm.bundle)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_absolute_positions_and_other_weights_than_the_probe_has_are_refused(tmp_path: Path) -> None:
    bundle = load_bundle(make(tmp_path / "made").bundle)
    absolute = bundle.section.model_copy(update={"positions": "absolute"})
    with pytest.raises(ConfigError, match=r"absolute positions has no memory.* Export a bundle"):
        export_huggingface_code(tmp_path / "out", dataclasses.replace(bundle, section=absolute))
    with torch.no_grad():
        bundle.model.blocks[0].ff_in.weight *= 1.1  # type: ignore[union-attr, operator]
    with pytest.raises(CheckpointError, match="does not reproduce its probe"):
        export_huggingface_code(tmp_path / "out", bundle)
    assert not (tmp_path / "out").exists()
