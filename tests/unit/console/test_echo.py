"""Text from any source cannot control the terminal on which it is printed."""

from __future__ import annotations

import ast
import io
import logging
import sys
from pathlib import Path

import pytest

import txl_dist
from txl_dist.cli.main import main
from txl_dist.console.echo import echo, write_text
from txl_dist.console.logging import logger, start_logging
from txl_dist.errors import escaped

PACKAGE = Path(txl_dist.__file__).parent
HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r\b\u202egpj.exe\u2066\udc80z"
STEERS = [*range(9), *range(11, 32), 127, *range(128, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xD800]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def is_harmless(text: str) -> bool:
    return not any(chr(point) in text for point in STEERS)


@pytest.mark.parametrize("point", STEERS)
def test_every_character_that_steers_a_terminal_is_written_out(point: int) -> None:
    shown = escaped(f"a{chr(point)}b")
    assert is_harmless(shown)
    assert shown.encode().decode("unicode_escape") == f"a{chr(point)}b"


def test_text_that_steers_nothing_is_as_it_was() -> None:
    text = "lines\nand\ttabs, \u00e9\u4e2d\U0001f600 \u05d0\u0628\u200d \\x1b"
    assert escaped(text) == text


def test_generated_text_is_escaped_on_a_terminal_and_exact_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    text = HOSTILE.replace("\udc80", "")
    monkeypatch.setattr(sys, "stdout", Terminal())
    write_text(text)
    assert is_harmless(sys.stdout.getvalue())  # type: ignore[attr-defined]
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="utf-8", newline=""))
    write_text(text)
    assert file.getvalue() == text.encode()


def test_a_locale_of_ascii_is_no_reason_to_fail() -> None:
    file = io.BytesIO()
    stream = io.TextIOWrapper(file, encoding="ascii")
    echo("caf\u00e9", to=stream, flush=True)
    assert file.getvalue() == b"caf\\xe9\n"


def test_an_error_about_a_hostile_name_is_one_harmless_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "no" + HOSTILE.replace("/", "")]) == 2
    output = capsys.readouterr()
    assert is_harmless(output.err + output.out)
    assert output.err.count("\n") == 1


def test_a_log_line_with_a_hostile_name_is_harmless(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    start_logging(file=tmp_path / "log.txt")
    try:
        logger.warning("passed over %s", HOSTILE)
    finally:
        start_logging()
        logging.shutdown()
    assert "passed over" in capsys.readouterr().err
    assert is_harmless((tmp_path / "log.txt").read_text(encoding="utf-8"))


def test_nothing_in_the_package_writes_to_people_by_another_way() -> None:
    """Each exception stands here with its reason."""
    known = {
        "console/echo.py": ["print"],
        "cli/tyro_events.py": ["stdout.write"],  # help of tyro, with its colours
        "__main__.py": ["stderr.write", "stderr.write"],  # for a Python that cannot read the rest
    }
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        if names := sorted(filter(None, map(_prints, calls))):
            found[path.relative_to(PACKAGE).as_posix()] = names
    assert found == known


def _prints(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return "print" if call.func.id == "print" else ""
    if not isinstance(call.func, ast.Attribute):
        return ""
    if call.func.attr == "print":
        return "print"
    is_stream = isinstance(call.func.value, ast.Attribute) and call.func.value.attr in ("stdout", "stderr")
    return f"{call.func.value.attr}.{call.func.attr}" if is_stream and call.func.attr.startswith("write") else ""
