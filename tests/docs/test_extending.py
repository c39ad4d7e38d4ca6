"""The code of docs/extending.md is that of examples/plugin, which tests/dist/test_plugins.py runs, or it is run
here."""

from tests.docs.pages import ROOT, blocks_of

EXAMPLES = sorted((ROOT / "examples" / "plugin").rglob("*.py"))


def test_every_block_of_code_on_the_page_stands_in_the_example() -> None:
    sources = [path.read_text(encoding="utf-8") for path in EXAMPLES]
    page = ROOT / "docs" / "extending.md"
    blocks = [block for block in blocks_of(page) if block.language == "python" and block.mark != "run"]
    assert len(blocks) == 3
    for block in blocks:
        assert any(block.text.strip("\n") in source for source in sources), block.place


def test_every_example_is_named_on_the_page() -> None:
    content = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    collections = {"__init__.py", "training.py", "text.py"}  # these import the others
    for example in EXAMPLES:
        if example.name not in collections:
            assert str(example.relative_to(ROOT)) in content, example.name
