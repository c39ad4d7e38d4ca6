"""The model card: what a model is and where it comes from, for people and for the Hugging Face Hub.

    card.json    facts about the training, and facts that the user stated (only in bundles)
    README.md    these facts for people, after the metadata block that the Hub reads (in every exported folder)

Facts come from the run's records and from command-line flags. The card says "not stated" for every other fact, and
guesses nothing. People can edit README.md, because no program reads it and its hash is not checked.

This module imports no torch, so that `txl report` shows a card at once.
"""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from txl_dist.artifacts import ArtifactKind
from txl_dist.config.schema import ModelSection
from txl_dist.console.formatting import bounded, cluster_starts, counted, flag_of, format_bytes, format_count, printable
from txl_dist.console.suggest import did_you_mean
from txl_dist.errors import ConfigError
from txl_dist.io.files import read_bytes, write_bytes
from txl_dist.io.hub import NAME_OF_A_REPOSITORY

CARD, README = "card.json", "README.md"
NOT_STATED = "not stated"
HOME = "https://arxiv.org/abs/1901.02860"
LICENSES = (
    "apache-2.0",
    "mit",
    "openrail",
    "bigscience-openrail-m",
    "creativeml-openrail-m",
    "bigscience-bloom-rail-1.0",
    "bigcode-openrail-m",
    "afl-3.0",
    "artistic-2.0",
    "bsl-1.0",
    "bsd",
    "bsd-2-clause",
    "bsd-3-clause",
    "bsd-3-clause-clear",
    "c-uda",
    "cc",
    "cc0-1.0",
    "cc-by-2.0",
    "cc-by-2.5",
    "cc-by-3.0",
    "cc-by-4.0",
    "cc-by-sa-3.0",
    "cc-by-sa-4.0",
    "cc-by-nc-2.0",
    "cc-by-nc-3.0",
    "cc-by-nc-4.0",
    "cc-by-nd-4.0",
    "cc-by-nc-nd-3.0",
    "cc-by-nc-nd-4.0",
    "cc-by-nc-sa-2.0",
    "cc-by-nc-sa-3.0",
    "cc-by-nc-sa-4.0",
    "cdla-sharing-1.0",
    "cdla-permissive-1.0",
    "cdla-permissive-2.0",
    "wtfpl",
    "ecl-2.0",
    "epl-1.0",
    "epl-2.0",
    "etalab-2.0",
    "eupl-1.1",
    "eupl-1.2",
    "agpl-3.0",
    "gfdl",
    "gpl",
    "gpl-2.0",
    "gpl-3.0",
    "lgpl",
    "lgpl-2.1",
    "lgpl-3.0",
    "isc",
    "h-research",
    "intel-research",
    "lppl-1.3c",
    "ms-pl",
    "apple-ascl",
    "apple-amlr",
    "mpl-2.0",
    "odc-by",
    "odbl",
    "openmdw-1.0",
    "openmdw-1.1",
    "openrail++",
    "osl-3.0",
    "postgresql",
    "ofl-1.1",
    "ncsa",
    "unlicense",
    "zlib",
    "pddl",
    "lgpl-lr",
    "deepfloyd-if-license",
    "fair-noncommercial-research-license",
    "llama2",
    "llama3",
    "llama3.1",
    "llama3.2",
    "llama3.3",
    "llama4",
    "grok2-community",
    "gemma",
    "unknown",
    "other",
)
"""Identifiers of licenses that the Hub knows (hub-docs, repositories-licenses, August 2026). The metadata of a card
state any other license as `other`, with the license's name."""
MAX_STATED = 500
"""Largest number of characters of a fact that the user states."""
TOKENIZERS = {
    "byte": "bytes",
    "char": "characters",
    "word": "words",
    "listed": "a list of symbols",
    "bpe": "byte-level BPE",
    "unigram": "byte-level unigram",
    "huggingface": "a Hugging Face tokenizer.json, renumbered by frequency",
    "sentencepiece": "a SentencePiece model, renumbered by frequency",
}
"""Name for people of each kind of tokenizer, as a card shows it."""
TAKE_ANY_TEXT = ("byte", "bpe", "unigram", "huggingface")
"""Kinds of tokenizers that encode any text, in txl_dist and in transformers. For a tokenizer of another kind, the
examples on a card give the prompt as ids."""
PROMPT, PROMPT_IDS = "The ", [1, 2, 3]
"""Prompt in the example commands of a card, as text and as ids."""
FACTS = ("fact", "value")
"""Header row of a table of facts. Without a header, Markdown shows an empty row."""
Rows = list[tuple[str, str]]
"""Rows of a table of facts: (name of the fact, its value for people)."""


@dataclass(frozen=True, kw_only=True)
class Stated:
    """Facts about a model that only its user can give, by flags of `txl export`.

    An empty fact is "not stated" on the card.
    """

    name: str = ""
    """Name of the model on its card. Empty means the run's name."""
    license: str = ""
    """License of the weights: an identifier of the Hub, for example apache-2.0, or another name."""
    author: str = ""
    """Author of the model: a person or an organization."""
    base_model: str = ""
    """Model on the Hub that gave the initial weights, as OWNER/NAME."""
    data_license: str = ""
    """License of the training text."""

    def check(self) -> None:
        """Raise ConfigError if a fact is blank, too long or unprintable, or the base model or license is misspelt."""
        for key, value in vars(self).items():
            flag = flag_of(key)
            if value and not value.strip():
                raise ConfigError(f"{flag} is blank. Remove the flag if there is nothing to state.")
            if len(value) > MAX_STATED:
                raise ConfigError(f"{flag} has {len(value):,} characters, more than {MAX_STATED}. Shorten the text.")
            wrong = _unprintable(value)
            if wrong:
                raise ConfigError(
                    f"{flag} contains the character {wrong!r}, but this field of a model card must be one line of text."
                )
        if self.base_model and not NAME_OF_A_REPOSITORY.fullmatch(self.base_model):
            raise ConfigError(f"--base-model {self.base_model} does not name a model of the Hub. Write OWNER/NAME.")
        if self.license.lower() not in LICENSES and (meant := _otherwise_spelt(self.license)):
            raise ConfigError(
                f"--license {self.license}: the Hub writes this license as {meant}. Type --license {meant}."
            )

    def remark(self) -> str:
        """Return a warning about a license that the Hub does not know, or an empty text if the Hub knows it."""
        if self.license.lower() == "other":
            return (
                "--license other does not name the license. Give the name, as in --license 'ACME Research 1.0'. The "
                "card's metadata then contain license: other, with this name"
            )
        if not self.license or self.license.lower() in LICENSES:
            return ""
        return (
            f"--license {self.license} is not an identifier of the Hub, so the card's metadata contain license: "
            "other, with this name. Add the text of the license as a file "
            f"LICENSE.{did_you_mean(self.license, LICENSES)}"
        )


class _Fact(BaseModel):
    """Base of the records in card.json. Types are strict, and records cannot be changed."""

    model_config = ConfigDict(strict=True, frozen=True)


class Score(_Fact):
    """Score of the exported weights on a validation or test split, and how it was measured."""

    corpus: str
    split: str
    loss: float
    """Mean loss in nats per token."""
    ppl: float
    """Perplexity per token. For a word tokenizer a token is a word."""
    token: str = "token"
    """Noun for one token of this tokenizer, for example "token" or "word"."""
    bits_per_byte: float | None = None
    """Bits per byte of the text. None if the loss does not cover the whole text."""
    tokens: int
    """Number of tokens that were scored."""
    segment_len: int
    """Number of tokens that the model scored at a time, as one segment."""
    memory_len: int
    """Number of past tokens in the memory."""
    num_lanes: int
    """Number of parts into which the split was divided. The parts were scored in parallel, as rows of a batch."""
    overlap_len: int = 0
    """Number of tokens that the model reads again as context before each segment. These tokens are not scored again."""
    precision: str = ""

    @property
    def protocol(self) -> str:
        """Description for people of the way in which the score was measured."""
        if self.overlap_len:
            overlap = f", {counted(self.overlap_len, 'token')} of each segment run again as context"
        else:
            overlap = ""
        if self.precision:
            precision = f", in {self.precision}"
        else:
            precision = ""
        return (
            f"evaluated at the end of this training step on {counted(self.num_lanes, 'lane')}, segments of "
            f"{counted(self.segment_len, 'token')}, memory of {counted(self.memory_len, 'token')}{overlap}{precision}"
        )


class Sample(_Fact):
    """Text that the model generated during training, with its prompt."""

    prompt: str
    text: str
    how: str
    """Description for people of when and how the text was generated."""


class Card(_Fact):
    """Facts about a model that its weights and settings do not hold.

    Values that are empty, 0 or None mean "not stated".
    """

    name: str = ""
    license: str = ""
    author: str = ""
    base_model: str = ""
    data_license: str = ""
    corpora: tuple[str, ...] = ()
    """Names of the corpora that the model was trained on."""
    tokens_seen: int = 0
    """Number of tokens that the model was trained on. A token that was read twice counts twice."""
    epochs: float | None = None
    """Number of passes over the training text."""
    began_with: str = ""
    """Bundle that gave the initial weights, or `fresh` for random weights."""
    commit: str = ""
    """Git commit of the program that trained the model."""
    version: str = ""
    """Version of txl_dist that trained the model."""
    date: str = ""
    """Day, in UTC, on which the weights were saved."""
    scores: tuple[Score, ...] = ()
    """Scores of the weights on the corpora's splits."""
    sample: Sample | None = None
    """Text that the model generated during training. None if there is none."""

    def with_stated(self, stated: Stated) -> Card:
        """Return a copy of the card with newly stated facts. A fact that `stated` leaves empty keeps its old value."""
        return self.model_copy(update={key: value for key, value in vars(stated).items() if value})


NOTHING_STATED = Card()
"""Card without any facts, for a model about which nothing is known."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Facts about a model that its card shows. A value of None means that the fact is unknown."""

    section: ModelSection
    vocab_size: int
    segment_len: int
    memory_len: int
    memory_lens: Sequence[int] = ()
    document_mask: bool = False
    dtype: str
    """Number type of the weights in the file."""
    tokenizer: str | None = None
    """Kind of the tokenizer (a key of `TOKENIZERS`). None if it is unknown."""
    num_parameters: int | None = None
    num_bytes: int | None = None
    """Size in bytes of the file of weights. None if it is unknown."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Origin of the weights, as config.json of the bundle records it."""
    is_xlnet_folder: bool = False
    """True if transformers loads the folder as XLNet, not as Transformer-XL."""
    card: Card

    @property
    def title(self) -> str:
        """Title of the card: the stated name, else the run's name, else the kind of model."""
        return printable(self.card.name or str(self.source.get("run") or "Transformer-XL language model"))

    @property
    def origin(self) -> str:
        """Origin of the weights for people: a run and step, or the file that was imported."""
        if "step" in self.source:
            if self.source.get("average"):
                average = ", average of the weights"
            else:
                average = ""
            return f"step {_count(self.source['step'])} of the run {self.source.get('run', NOT_STATED)}{average}"
        if "imported" in self.source:
            return f"imported from {self.source.get('file', NOT_STATED)} ({self.source['imported']})"
        return NOT_STATED


class Code(NamedTuple):
    """Block of shell commands or Python code on a card."""

    title: str
    language: str
    text: str


SERVE_THE_BUNDLE = Code("Serve over HTTP the bundle that this folder was exported from", "bash", "txl serve BUNDLE")


def read_card(folder: Path) -> Card:
    """Read the card of a bundle. Returns `NOTHING_STATED` for a bundle without card.json.

    Raises OSError if the file cannot be read, and ValueError if its content is not a card.
    """
    try:
        content = read_bytes(folder / CARD)
    except FileNotFoundError:
        return Card()
    return Card.model_validate_json(content)


def write_card(folder: Path, card: Card) -> None:
    """Write a card as card.json into a folder. Raises OSError if the file cannot be written."""
    write_bytes(folder / CARD, card.model_dump_json(indent=1, exclude_defaults=True).encode() + b"\n")


def write_readme(folder: Path, model: Model, kind: ArtifactKind) -> None:
    """Write README.md, the model card, into an exported folder. `kind` is the kind of the folder, for example a bundle.

    Raises OSError if the file cannot be written.
    """
    write_bytes(folder / README, readme(model, kind).encode())


def readme(model: Model, kind: ArtifactKind) -> str:
    """Return the text of a model card: the Hub's metadata, then Markdown with commands that use the folder.

    `kind` is the kind of the exported folder, on which the commands depend.
    """
    parts = [
        f"---\n{_metadata(model, kind)}---\n",
        f"# {_plain(model.title)}\n",
        f"A [Transformer-XL]({HOME}) language model, exported by txl_dist.\n",
        f"## Model\n\n{_table([FACTS, *model_rows(model)])}",
        f"## Training\n\n{_table([FACTS, *training_rows(model)])}",
        f"## Evaluation scores\n\n{_scores(model)}",
        f"## Sample\n\n{_sample(model.card.sample)}",
        "## Use\n\nThese commands are for the folder of this file.\n",
        *(f"### {code.title}\n\n{_fenced(code.text, code.language)}" for code in usage_examples(model, kind, ".")),
        "This file is for people and may be edited. No program reads it, and `txl verify` ignores it.\n",
    ]
    return "\n".join(parts)


def model_rows(model: Model) -> Rows:
    """List the facts about a model's shape, its tokenizer and the size of its weights."""
    section = model.section
    memory = f"{model.memory_len:,}"
    if len(set(model.memory_lens)) > 1:
        memory = f"{', '.join(map(_count, model.memory_lens))} by layer"
    softmax = "plain"
    if section.cutoffs:
        softmax = f"adaptive, {cluster_starts(section.cutoffs)}"
    return [
        ("Parameters", NOT_STATED if model.num_parameters is None else f"{model.num_parameters:,}"),
        ("Layers", _count(section.num_layers)),
        ("Width", f"{section.width:,}, feed-forward {section.ff_width:,}"),
        ("Attention heads", f"{section.num_heads:,} of width {section.head_width:,}, {section.positions} positions"),
        ("Segment", f"{counted(model.segment_len, 'token')}"),
        ("Memory", f"{memory} tokens"),
        ("Documents", "attention stays within a document" if model.document_mask else "one stream of text"),
        ("Tokenizer", TOKENIZERS.get(model.tokenizer or "", model.tokenizer or NOT_STATED)),
        ("Vocabulary", f"{model.vocab_size:,} ids"),
        ("Softmax", softmax),
        ("Weights", model.dtype if model.num_bytes is None else f"{format_bytes(model.num_bytes)} in {model.dtype}"),
    ]


def training_rows(model: Model) -> Rows:
    """List the facts about a model's training, and the facts that the user stated."""
    card = model.card
    tokens = NOT_STATED
    if card.tokens_seen:
        if card.epochs is None:
            epochs = ""
        else:
            epochs = f", {format_count(card.epochs)} passes over the training text"
        tokens = f"{card.tokens_seen:,}{epochs}"
    began = {"": NOT_STATED, "fresh": "random weights"}.get(card.began_with, card.began_with)
    rows = [
        ("Origin", model.origin),
        ("Training text", ", ".join(card.corpora) or NOT_STATED),
        ("License of the training text", card.data_license or NOT_STATED),
        ("Training tokens", tokens),
        ("Began with", began),
        ("Base model", card.base_model or NOT_STATED),
        ("Commit of txl_dist", card.commit or NOT_STATED),
        ("Version of txl_dist", card.version or NOT_STATED),
        ("Date of the weights", card.date or NOT_STATED),
        ("Author", card.author or NOT_STATED),
        ("License", card.license or NOT_STATED),
    ]
    return [(name, printable(value)) for name, value in rows]


def score_rows(scores: Sequence[Score]) -> list[list[str]]:
    """Return the scores as rows of a table. The first row is the header."""
    rows = [["corpus", "split", "nats per token", "perplexity", "bits per byte", "tokens"]]
    for score in scores:
        if score.bits_per_byte is None:
            bits = "-"
        else:
            bits = bounded(score.bits_per_byte)
        names = [printable(score.corpus), printable(score.split) or "-"]
        ppl = format_count(score.ppl, digits=4) + (" per word" if score.token == "word" else "")
        rows.append([*names, bounded(score.loss), ppl, bits, f"{score.tokens:,}"])
    return rows


def protocols(scores: Sequence[Score]) -> list[str]:
    """List the ways in which the scores were measured, without repetitions."""
    return list(dict.fromkeys(printable(score.protocol) for score in scores))


def usage_examples(model: Model, kind: ArtifactKind, address: str) -> list[Code]:
    """Return example code that loads, runs and serves an exported folder.

    `kind` is the kind of the folder, for example a bundle. `address` is the folder's path or its hf:// address.
    """
    quoted = shlex.quote(address)
    takes_text = model.tokenizer in TAKE_ANY_TEXT
    if takes_text:
        asked = json.dumps(PROMPT)
    else:
        asked = str(PROMPT_IDS)
    if takes_text:
        flags = f"--prompt {json.dumps(PROMPT)}"
    else:
        flags = f"--tokens {' '.join(map(str, PROMPT_IDS))}"
    if model.is_xlnet_folder or model.section.any_order:
        return _xlnet_examples(model, kind, address)
    if kind is ArtifactKind.BUNDLE:
        load = (
            f"import txl_dist\n\nlm = txl_dist.load({json.dumps(address)})\n"
            f"print(lm.generate({asked}, max_tokens=40).text)"
        )
        return [
            Code("Generate", "bash", f"txl generate {quoted} {flags} --max-tokens 40"),
            Code("Load from Python", "python", load),
            Code("Serve over HTTP", "bash", f"txl serve {quoted}"),
            Code("Score a corpus", "bash", f"txl evaluate {quoted} --data CORPUS"),
        ]
    if kind is ArtifactKind.HUGGINGFACE:
        load = (
            "from transformers import TransfoXLLMHeadModel\n\n"
            f"model = TransfoXLLMHeadModel.from_pretrained({json.dumps(address)})"
        )
        serve = (
            f"txl import {quoted} bundle --format huggingface\n"
            f"txl generate bundle {flags} --max-tokens 40\n"
            "txl serve bundle"
        )
        return [
            Code("Load with transformers 4.46.3", "python", load),
            Code("Generate and serve with txl_dist", "bash", serve),
        ]
    if kind is ArtifactKind.HUGGINGFACE_CODE:
        load = _transformers_code(address, takes_text=takes_text)
        return [Code("Load and generate with transformers 5", "python", load), SERVE_THE_BUNDLE]
    load = (
        "from onnxruntime import InferenceSession\n\n"
        'token = InferenceSession("token.onnx")   # config.json names its inputs and outputs\n'
        "print([(one.name, one.shape) for one in token.get_inputs()])"
    )
    return [Code("Load with ONNX Runtime", "python", load), SERVE_THE_BUNDLE]


def _xlnet_examples(model: Model, kind: ArtifactKind, address: str) -> list[Code]:
    """Return example code for a bundle that predicts in any order, or for a folder that transformers loads as XLNet."""
    quoted = shlex.quote(address)
    if kind is ArtifactKind.BUNDLE:
        return [
            Code("Score a corpus", "bash", f"txl evaluate {quoted} --data CORPUS"),
            Code("Fine-tune with transformers", "bash", f"txl export {quoted} FOLDER --format xlnet"),
        ]
    name = "XLNetForSequenceClassification" if model.section.any_order else "XLNetLMHeadModel"
    load = f"from transformers import {name}\n\nmodel = {name}.from_pretrained({json.dumps(address)})"
    return [
        Code("Load with transformers", "python", load),
        Code("Convert to a bundle", "bash", f"txl import {quoted} BUNDLE --format xlnet"),
    ]


def _transformers_code(address: str, *, takes_text: bool) -> str:
    model = f"AutoModelForCausalLM.from_pretrained({json.dumps(address)}, trust_remote_code=True)"
    if not takes_text:
        return (
            "import torch\nfrom transformers import AutoModelForCausalLM\n\n"
            f"model = {model}\n"
            f"print(model.generate(torch.tensor([{PROMPT_IDS}]), max_new_tokens=40))"
        )
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = {model}\n"
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(address)}, trust_remote_code=True)\n"
        f'batch = tokenizer([{json.dumps(PROMPT)}], return_tensors="pt")\n'
        "print(tokenizer.batch_decode(model.generate(**batch, max_new_tokens=40)))"
    )


def license_fields(license: str) -> dict[str, str]:
    """Return the keys and values by which the Hub's metadata describe a stated license."""
    if not license:
        return {}
    if license.lower() in LICENSES:
        return {"license": license.lower()}
    return {"license": "other", "license_name": re.sub(r"[^a-z0-9.]+", "-", license.lower()).strip("-") or "other"}


def _otherwise_spelt(license: str) -> str:
    """Return the Hub's spelling of a license (apache-2.0 for Apache2), or an empty text for a license that the Hub does
    not know."""
    found = [known for known in LICENSES if _spelling(known) == _spelling(license)]
    if len(found) == 1:
        return found[0]
    return ""


def _spelling(license: str) -> str:
    """Reduce the name of a license to the letters, digits and + that distinguish licenses."""
    name = license.lower().replace("++", "plusplus")
    name = re.sub(r"\b(the|license|licence|version)\b", " ", name)
    name = re.sub(r"v(?=[. ]?\d)|\.0\b", "", name)
    return re.sub(r"[^a-z0-9]", "", name)


def _metadata(model: Model, kind: ArtifactKind) -> str:
    """Return the YAML block of the card, one key per line. Values are written in JSON, which is valid YAML."""
    card = model.card
    values: dict[str, Any] = {
        **license_fields(card.license),
        "library_name": "transformers"
        if kind in (ArtifactKind.HUGGINGFACE, ArtifactKind.HUGGINGFACE_CODE)
        else "txl_dist",
        "pipeline_tag": "text-generation",
        "tags": ["transformer-xl", *(["custom_code"] if kind is ArtifactKind.HUGGINGFACE_CODE else [])],
    }
    if model.section.any_order:
        del values["pipeline_tag"]
        values["tags"] += ["xlnet"]
    if card.base_model:
        values["base_model"] = card.base_model
    results = [_result(score) for score in card.scores]
    if results:
        values["model-index"] = [{"name": model.title, "results": results}]
    return "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


def _result(score: Score) -> dict[str, Any]:
    corpus = printable(score.corpus)
    metrics = [
        {"type": "loss", "name": "nats per token", "value": score.loss},
        {"type": "perplexity", "name": f"perplexity per {printable(score.token)}", "value": score.ppl},
    ]
    if score.bits_per_byte is not None:
        metrics.append({"type": "bits_per_byte", "name": "bits per byte", "value": score.bits_per_byte})
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": corpus, "name": corpus, "split": printable(score.split)},
        "metrics": metrics,
    }


def _scores(model: Model) -> str:
    scores = model.card.scores
    if not scores:
        return f"{NOT_STATED.capitalize()}. `txl evaluate` measures them on a corpus.\n"
    sentences = [f"{_plain(text[:1].upper() + text[1:])}." for text in protocols(scores)]
    return "\n".join([_table(score_rows(scores), num_names=2), *sentences, ""])


def _sample(sample: Sample | None) -> str:
    if sample is None:
        return f"{NOT_STATED.capitalize()}.\n"
    text = printable(sample.prompt + sample.text, keep="\n\t")
    if sample.prompt:
        prompt = f"after the prompt {json.dumps(printable(sample.prompt), ensure_ascii=False)}"
    else:
        prompt = ""
    how = ", ".join(part for part in (sample.how, prompt) if part)
    return f"{_plain(how[:1].upper() + how[1:])}:\n\n{_fenced(text, 'text')}"


def _fenced(text: str, language: str) -> str:
    """Return a fenced block of code. Its fence is longer than any fence in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}\n"


def _table(rows: Sequence[Sequence[str]], *, num_names: int | None = None) -> str:
    """Return a Markdown table whose first row is the header. Columns after the first `num_names` are right-aligned."""
    head, *body = ["| " + " | ".join(map(_plain, row)) + " |" for row in rows]
    num_columns = len(rows[0])
    if num_names is None:
        names = num_columns
    else:
        names = num_names
    return "\n".join([head, "|" + "---|" * names + "---:|" * (num_columns - names), *body, ""])


def _plain(text: str) -> str:
    """Escape a text so that Markdown shows it literally."""
    return re.sub(r"([\\`*_\[\]|<>&#~])", r"\\\1", printable(text))


def _unprintable(text: str) -> str:
    """Return the first character that a card cannot hold on a line of YAML and Markdown, or an empty text."""
    wrong = (
        one for one in text if unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") or one in "\ufeff\ufffe\uffff"
    )
    return next(wrong, "")


def _count(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
