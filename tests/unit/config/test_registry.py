"""Plugins: their additions are known by name, their versions are recorded, and a plugin is imported only if it is
named."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from txl_dist import plugins
from txl_dist.config import registry
from txl_dist.config.load import choices_of, config_to_toml, configure, load_config
from txl_dist.config.schema import OPTIMIZERS, SCHEMES, ModelSection, OptimSection
from txl_dist.data.prepare.run import prepare_corpus
from txl_dist.data.prepare.sources import TEXT_SOURCES
from txl_dist.errors import CheckpointError, ConfigError, DataError
from txl_dist.inference.bundle import Package, load_bundle, write_bundle
from txl_dist.inference.probe import probe_of
from txl_dist.model.attention import RelativeEncodings
from txl_dist.model.block import Block
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.tokenizers.base import END_OF_TEXT, SpelledTokenizer
from txl_dist.tokenizers.learning import LEARNT_KINDS
from txl_dist.tokenizers.tokenizer import KINDS, read_tokenizer
from txl_dist.tokenizers.training import train_tokenizer
from txl_dist.train.engine.optimizer import build_optimizer
from txl_dist.train.report.metric_table import METRICS, cells_of

TABLES: tuple[dict[str, Any], ...] = (SCHEMES, OPTIMIZERS, METRICS, TEXT_SOURCES, LEARNT_KINDS, KINDS)


@pytest.fixture(autouse=True, scope="module")
def _installed_packages_are_listed_once() -> Iterator[None]:
    """Each plugin is looked for among the files of all installed packages, which takes half a second."""
    found = importlib.metadata.packages_distributions()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "packages_distributions", lambda: found)
        yield


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Every test leaves the tables, and the plugins of this process, as it found them."""
    before, loaded, added = [dict(table) for table in TABLES], dict(registry._loaded), list(registry._added)
    modules = set(sys.modules)
    yield
    for table, rows in zip(TABLES, before, strict=True):
        table.clear()
        table.update(rows)
    registry._loaded.clear()
    registry._loaded.update(loaded)
    registry._added[:] = added
    for name in set(sys.modules) - modules:
        if name.startswith("plugin_"):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes a module that can be imported."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, source: str) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return path

    return write


OPTIMIZER = """
import torch
from txl_dist import plugins
plugins.register_optimizer("plain", lambda groups, lr: torch.optim.SGD(groups, lr=lr), settings=())
"""


def test_a_config_that_names_a_plugin_knows_its_names(write: Callable[[str, str], Path], tmp_path: Path) -> None:
    write("plugin_a.py", OPTIMIZER)
    config = configure(run={"plugins": ["plugin_a"]}, optim={"name": "plain"})
    assert config.optim.kind.settings == ()
    assert "plain" in choices_of("optim.name")
    (tmp_path / "a.toml").write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(tmp_path / "a.toml") == config
    with pytest.raises(ConfigError, match=r"optim\.name = 'plai': it can be adam, .*, plain .*Did you mean plain"):
        configure(optim={"name": "plai"})


def test_settings_that_lie_in_a_checkpoint_import_nothing(write: Callable[[str, str], Path], tmp_path: Path) -> None:
    write("plugin_b.py", f"open({str(tmp_path / 'was_run')!r}, 'w').close()\n{OPTIMIZER}")
    (tmp_path / "config.toml").write_text('[run]\nplugins = ["plugin_b"]\n[optim]\nname = "plain"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"names the plugin plugin_b, which is not loaded. If you trust") as refused:
        load_config(tmp_path / "config.toml")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "was_run").exists()
    assert "plugin_b" not in sys.modules
    (tmp_path / "config.toml").write_text('[run]\nplugins = ["plugin_b"]\n', encoding="utf-8")
    load_config(tmp_path / "config.toml")  # nothing of it is needed
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0\n", r"ZeroDivisionError: division by zero \(.*plugin_c\.py:1\)"),
        ("def f(:\n", "SyntaxError"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise ValueError('two\\nlines')\n", "ValueError: two lines"),
        ("from txl_dist import plugins\nplugins.register_optimizer('adam', None)\n", "optimizer 'adam' exists already"),
        ("from txl_dist import plugins\nplugins.register_optimizer('a b', None)\n", "a name may contain only letters"),
        (
            "from txl_dist import plugins\nplugins.register_optimizer('x', None, settings=('beta',))\n",
            r"\[optim\] has no setting 'beta'",
        ),
        (
            "from txl_dist import plugins\nplugins.register_positions('x', sinusoids='distances')\n",
            "need a function `build`",
        ),
    ],
)
def test_a_plugin_that_fails_is_one_line_and_leaves_nothing(
    source: str, reason: str, write: Callable[[str, str], Path]
) -> None:
    write("plugin_c.py", source)
    with pytest.raises(ConfigError, match=reason) as refused:
        registry.load_plugins(["plugin_c"])
    assert "\n" not in str(refused.value)
    assert "the plugin plugin_c cannot be imported" in str(refused.value)
    assert registry.loaded_plugins() == ()


def test_what_a_failed_plugin_has_added_is_taken_back(write: Callable[[str, str], Path]) -> None:
    path = write("plugin_d.py", f"{OPTIMIZER}\n1 / 0\n")
    with pytest.raises(ConfigError, match="division by zero"):
        registry.load_plugins(["plugin_d"])
    assert "plain" not in OPTIMIZERS
    path.write_text(OPTIMIZER + "# mended\n", encoding="utf-8")
    registry.load_plugins(["plugin_d"])
    assert "plain" in OPTIMIZERS


@pytest.mark.parametrize("name", ["no_such_plugin", "no.such.module", "json.nothing"])
def test_a_missing_plugin_is_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the plugin {name} is not installed for .*pip install") as refused:
        registry.load_plugins([name])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "../x", "a b", "a..b", "/tmp/x.py", "x-y"])
def test_what_is_no_name_of_a_module_is_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a module"):
        registry.load_plugins([name])


def test_two_plugins_cannot_share_a_name(write: Callable[[str, str], Path]) -> None:
    write("plugin_e.py", OPTIMIZER)
    write("plugin_f.py", OPTIMIZER)
    with pytest.raises(ConfigError, match="optimizer 'plain' exists already, from the plugin plugin_e"):
        registry.load_plugins(["plugin_e", "plugin_f"])


def test_a_plugin_is_known_by_the_files_of_its_package(write: Callable[[str, str], Path]) -> None:
    write("plugin_g/__init__.py", "__version__ = '1.2'\n")
    write("plugin_g/part.py", OPTIMIZER)
    helper = write("plugin_g/helper.py", "x = 1\n")
    registry.load_plugins(["plugin_g.part"])
    (plugin,) = registry.loaded_plugins()
    assert plugin.name == "plugin_g.part"
    recorded = [plugin._asdict()]
    assert registry.require_plugins(recorded, where="bundle") == []
    helper.write_text("x = 2\n", encoding="utf-8")
    registry._loaded.clear()
    registry.load_plugins(["plugin_g.part"])
    (line,) = registry.require_plugins(recorded, where="bundle")
    assert line.startswith("bundle was made with the plugin plugin_g.part (sha256 ")
    assert "has changed since then: now" in line
    registry._loaded.clear()
    with pytest.raises(ConfigError, match=r"bundle was made with the plugin plugin_g.part .*is not loaded.*--plugins"):
        registry.require_plugins(recorded, where="bundle")
    (line,) = registry.plugin_changes(recorded, where="step_000000010")
    assert "which is not loaded now" in line


def test_a_single_file_is_its_own_hash(write: Callable[[str, str], Path]) -> None:
    path = write("plugin_h.py", OPTIMIZER)
    registry.load_plugins(["plugin_h"])
    data = path.read_bytes()
    expected = hashlib.sha256(f"plugin_h.py\0{len(data)}\0".encode() + data).hexdigest()
    assert registry.loaded_plugins()[0].sha256 == expected


def test_a_metric_is_on_the_console_only_where_it_could_be_made() -> None:
    plugins.register_metric("twice", lambda record: 2 * record["loss"], form=".1f", label="2x")
    assert "2x 3.0" in [cell.text for cell in cells_of({"twice": 3.0})]
    assert cells_of({"step": 1}) == []


def test_a_tokenizer_of_an_unknown_kind_names_the_remedy() -> None:
    content = json.dumps({"format_version": 1, "kind": "klingon", "end_of_text": None, "symbols": []}).encode()
    with pytest.raises(DataError, match=r"unknown kind 'klingon'.*--plugins NAME"):
        read_tokenizer(content, name="t.json")


@pytest.mark.parametrize("made", [None, "text", train_tokenizer("byte", lambda: ["a"])])
def test_what_a_plugin_learns_must_be_a_tokenizer_of_its_kind(made: Any) -> None:
    LEARNT_KINDS["mine"] = LEARNT_KINDS["byte"]._replace(learn=lambda texts, learning: made)
    with pytest.raises(ConfigError, match="It must return a Tokenizer whose kind is"):
        train_tokenizer("mine", lambda: ["a"])


class Sloped(nn.Module):
    """RelativeEncodings with two buffers that follow from the settings, one of them in a child."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.head_width = model.head_width
        self.register_buffer("slope_N", -torch.arange(1.0, model.num_heads + 1) / 10)
        self.inner = nn.Module()
        self.inner.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.weight = nn.Parameter(torch.empty(model.num_heads, model.head_width))

    def forward(self, num_distances: int, encoding_KD: Tensor | None) -> RelativeEncodings:
        distance_K = torch.arange(num_distances - 1, -1, -1, device=self.slope_N.device)
        bias_KN = (distance_K[:, None] * self.slope_N * self.inner.scale).to(self.weight.dtype)
        return RelativeEncodings(self.weight.expand(num_distances, -1, -1), bias_KN)


def package_with(section: ModelSection) -> Package:
    """A random model that proves itself."""
    tokenizer = train_tokenizer("byte", lambda: ["some text"])
    torch.manual_seed(3)
    network = TransformerXL(section, vocab_size=tokenizer.vocab_size).eval()
    return Package(
        section=section,
        weights={name: value.detach() for name, value in network.named_parameters()},
        tokenizer=tokenizer,
        segment_len=8,
        memory_len=8,
        source={},
        probe=probe_of(network, memory_len=8),
    )


SMALL = {"num_layers": 2, "width": 16, "num_heads": 2, "head_width": 8, "ff_width": 16, "init_std": 0.3}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_layer_with_buffers_is_exported_and_loaded_as_it_was_trained(dtype: str, tmp_path: Path) -> None:
    plugins.register_positions("sloped", Sloped)
    package = package_with(ModelSection.model_validate(SMALL | {"positions": "sloped"}))
    assert write_bundle(tmp_path / "bundle", package, dtype=dtype) < 0.2
    bundle = load_bundle(tmp_path / "bundle")
    slope_N = bundle.model.get_buffer("blocks.1.attention.distance.slope_N")
    assert torch.equal(slope_N, torch.tensor([-0.1, -0.2]).to(slope_N.dtype))


def test_a_buffer_that_no_settings_give_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Block.__init__

    def with_buffer(self: Block, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        self.ff_in.register_buffer("running_mean", torch.zeros(16))

    monkeypatch.setattr(Block, "__init__", with_buffer)
    package = package_with(ModelSection.model_validate(SMALL))
    with pytest.raises(CheckpointError, match=r"the layer blocks\.0\.ff_in has the buffer running_mean"):
        write_bundle(tmp_path / "bundle", package)
    assert not (tmp_path / "bundle").exists()


def test_a_bundle_that_needs_a_plugin_is_refused_without_it_and_imports_nothing(
    write: Callable[[str, str], Path], tmp_path: Path
) -> None:
    write("plugin_i.py", 'from txl_dist import plugins\nplugins.register_positions("content_only")\n')
    registry.load_plugins(["plugin_i"])
    write_bundle(tmp_path / "bundle", package_with(ModelSection.model_validate(SMALL | {"positions": "content_only"})))
    load_bundle(tmp_path / "bundle")
    registry._loaded.clear()
    del sys.modules["plugin_i"]
    SCHEMES.pop("content_only")
    with pytest.raises(ConfigError, match=r"bundle was made with the plugin plugin_i .*is not loaded"):
        load_bundle(tmp_path / "bundle")
    assert "plugin_i" not in sys.modules


FAULTY = """
import torch
from torch import nn
from txl_dist import plugins
from txl_dist.model.attention import RelativeEncodings

class Raising(nn.Module):
    def __init__(self, model):
        super().__init__()
        model.no_such_setting

class Returning(nn.Module):
    def __init__(self, found):
        super().__init__()
        self.found = found
    def forward(self, num_distances, encoding_KD):
        return self.found

plugins.register_positions("raising", Raising)
plugins.register_positions("nothing", lambda model: Returning(None))
plugins.register_positions("short", lambda model: Returning(RelativeEncodings(torch.zeros(1, 2, 8), None)))
plugins.register_positions("wide", lambda model: Returning(RelativeEncodings(torch.zeros(4, 2, 8), torch.zeros(4, 3))))
plugins.register_optimizer("without_lr", lambda groups: torch.optim.SGD(groups, lr=0.1))
plugins.register_optimizer("no_optimizer", lambda groups, lr: None)
plugins.register_optimizer("eager", torch.optim.Adagrad, settings=())
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raising", r"the plugin plugin_j: positions 'raising' failed: AttributeError: .*no_such_.*plugin_j\.py:10\)"),
        ("nothing", r"Returning\.forward\(4, \.\.\.\) returned NoneType\. forward must return .*key_KNH \[4, 2, 8\]"),
        ("short", r"returned key_KNH \[1, 2, 8\] and bias_KN None\. forward must"),
        ("wide", r"returned key_KNH \[4, 2, 8\] and bias_KN \[4, 3\]\. forward must"),
    ],
)
def test_a_faulty_positional_scheme_is_one_line(name: str, reason: str, write: Callable[[str, str], Path]) -> None:
    write("plugin_j.py", FAULTY)
    registry.load_plugins(["plugin_j"])
    section = ModelSection.model_validate(SMALL | {"positions": name})
    with pytest.raises(ConfigError, match=reason) as refused:
        TransformerXL(section, vocab_size=9).blocks[0].attention.distances(4, encoding_KD=None)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("without_lr", "the plugin plugin_j: optimizer 'without_lr' failed: TypeError: .*'lr'"),
        ("no_optimizer", "'no_optimizer': the build function returned a NoneType"),
        ("eager", r"'eager': Adagrad makes its state before the first step.* Make the state in step\(\)"),
    ],
)
def test_a_faulty_optimizer_is_one_line(name: str, reason: str, write: Callable[[str, str], Path]) -> None:
    write("plugin_j.py", FAULTY)
    registry.load_plugins(["plugin_j"])
    parameters = [("a", nn.Parameter(torch.zeros(2)))]
    with pytest.raises(ConfigError, match=reason):
        build_optimizer(parameters, OptimSection.model_validate({"name": name}))


def test_a_plugins_positions_may_set_their_own_initial_values() -> None:
    class Drawn(nn.Module):
        def __init__(self, model: ModelSection) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(30, model.num_heads))

    class Reset(Drawn):
        def reset_parameters(self) -> None:
            self.table.fill_(7.0)

    plugins.register_positions("drawn", Drawn)
    plugins.register_positions("reset", Reset)
    for name, mean, spread in (("drawn", 0.0, 0.3), ("reset", 7.0, 0.0)):
        model = TransformerXL(ModelSection.model_validate(SMALL | {"positions": name}), vocab_size=9)
        tables = [values for parameter, values in model.named_parameters() if parameter.endswith("distance.table")]
        assert len(tables) == 2
        for values in tables:
            assert values.mean().item() == pytest.approx(mean, abs=0.2)
            assert values.std().item() == pytest.approx(spread, abs=0.1)


class Told(SpelledTokenizer):
    """Returns what it is told to."""

    kind: ClassVar[str] = "told"
    answer: ClassVar[Any] = None

    @property
    def is_lossless(self) -> bool:
        return True

    def encode(self, text: str) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def register_told() -> None:
    """Register the tokenizer, as a plugin does."""
    plugins.register_tokenizer(Told, lambda texts, learning: Told(["a", "b", END_OF_TEXT], end_of_text=2))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([1, 2], "encode returned a list"),
        (np.zeros((2, 2), np.int32), "encode returned a ndarray. .* one dimension"),
        (np.zeros(2), "whole numbers"),
        (np.array([0, 99]), "encode returned the id 99, but the vocabulary has 3 ids"),
        (np.array([0, -1]), "encode returned the id -1"),
        (ValueError("two\nlines"), "the plugin plugin_k: tokenizer 'told' failed: ValueError: two lines"),
    ],
)
def test_a_faulty_tokenizer_is_one_line(
    answer: Any, reason: str, write: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("plugin_k.py", f"from {__name__} import register_told\nregister_told()\n")
    registry.load_plugins(["plugin_k"])
    monkeypatch.setattr(Told, "answer", answer)
    (tmp_path / "a.txt").write_text("some text\n" * 50, encoding="utf-8")
    with pytest.raises(DataError, match=reason) as refused:
        prepare_corpus(tmp_path / "corpus", inputs=[tmp_path / "a.txt"], kind="told", valid_fraction=0.0)
    assert "\n" not in str(refused.value)


def test_plugins_are_at_hand_without_an_import_of_their_own() -> None:
    code = "import txl_dist; txl_dist.plugins.load('no_such_plugin')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "the plugin no_such_plugin is not installed for" in result.stderr
