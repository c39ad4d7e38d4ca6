"""The page of the model is made from the code and its texts, and is not made if they do not match."""

import re

import pytest

from tools.checks.model_page import PAGE, WORDS, drawn_shift, is_stale, model_page, source_of

WHOLE = "CODE memory.py attended\n"


def test_the_page_is_what_the_code_gives() -> None:
    assert not is_stale(), "run `python -m tools.checks.model_page`"


def test_a_part_of_a_function_that_would_be_left_out_is_found() -> None:
    assert "return memory" in model_page('CODE memory.py attended until "return "\nCODE memory.py attended\n')
    with pytest.raises(ValueError, match="functions are not shown: attended"):
        model_page('CODE memory.py attended until "return "\n')
    with pytest.raises(ValueError, match="attended: all of its lines are shown"):
        model_page(WHOLE + WHOLE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("CODE memory.py forgotten\n", "forgotten: the module has 0 definitions"),
        ("CODE memory.py Memory.forgotten\n", "Memory.forgotten: the module has 0 definitions of forgotten"),
        ('CODE memory.py attended until "no such line"\n', "'no such line' is in 0 of the remaining lines"),
        (WHOLE + '> "no such line" x = y\n', "'no such line' is in 0 of the remaining lines"),
        (WHOLE + '> "memory" x = y\n', "'memory' is in [^01] of the remaining lines"),
    ],
)
def test_words_that_name_what_is_not_there_make_no_page(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_page(words)


def test_an_equation_stands_above_its_line_and_a_docstring_is_left_out() -> None:
    lines = model_page(WHOLE + '> "return " the same, and all of it is seen\n').splitlines()
    place = lines.index("    #> the same, and all of it is seen")
    assert lines[place + 1].startswith("    return memory._replace(")
    assert source_of('def f():\n    """One.\n\n    Two."""\n    return 1\n', "f") == ["def f():", "    return 1"]
    assert source_of("class C:\n    def f(self):\n        return 1\n", "C.f")[-1] == "        return 1"


def test_no_directive_is_left_in_the_page() -> None:
    assert re.findall(r"^(?:CODE|SHIFT|MADE_BY|> )", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == []
    assert len(re.findall("^CODE", WORDS.read_text(encoding="utf-8"), re.MULTILINE)) >= 7


def test_the_drawing_has_every_query_at_distance_0_from_its_own_key() -> None:
    for row, line in enumerate(drawn_shift(num_queries=3, memory_len=2).splitlines()[1:]):
        seen = line.split()[6:][: 2 + row + 1]
        assert seen == [f"{row}.{2 + row - key}" for key in range(2 + row + 1)]
