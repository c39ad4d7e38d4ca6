"""The code of docs/extending.md is that of examples/plugin, which tests/dist/test_plugins.py runs."""

from tests.docs.pages import ROOT, blocks_of

EXAMPLES = sorted((ROOT / "examples" / "plugin").rglob("*.py"))


def test_every_block_of_code_on_the_page_stands_in_the_example() -> None:
    sources = [path.read_text(encoding="utf-8") for path in EXAMPLES]
    blocks = [block for block in blocks_of(ROOT / "docs" / "extending.md") if block.language == "python"]
    assert len(blocks) == 8
    for block in blocks:
        assert any(block.text.strip("\n") in source for source in sources), block.place
