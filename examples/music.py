"""Symbolic music: MIDI files to ids, and a trained model's ids to MIDI, by MidiTok.

docs/preparing-data.md has the commands.

    python examples/music.py ids FOLDER --out data/music      MIDI files to ids.jsonl and names.txt: needs MidiTok
    python examples/music.py made --out data/music            the same of made-up pieces, to try it without MidiTok
    python examples/music.py write RUN --scale C --out a.mid  a piece in a scale, as names, and as MIDI by MidiTok

MidiTok comes with `pip install "txl_dist[music]"`. Its ids are prepared as they are (`txl prepare --vocab-list`), so
the number of a name's line, counted from 0, is its id here and there.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import txl_dist
from txl_dist.errors import ConfigError, DataError, TxlError, translate_errors
from txl_dist.tokenizers.base import END_OF_TEXT

NOTES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")
MAJOR = (0, 2, 4, 5, 7, 9, 11)
"""Semitones above the key."""


def midi_tokenizer() -> Any:
    """REMI (Huang and Yang 2020) with programs: one stream of tokens for all tracks. Raises ConfigError without it."""
    remedy = 'Run `pip install "txl_dist[music]"`.'
    with translate_errors(ConfigError, "MIDI needs the package miditok", remedy, of=(ImportError,)):
        from miditok import REMI, TokenizerConfig
    return REMI(TokenizerConfig(num_velocities=8, use_programs=True))


@contextmanager
def naming(path: Path, remedy: str) -> Iterator[None]:
    """What goes wrong in MidiTok, and in what it reads MIDI with, in one line that names the file."""
    try:
        yield
    except Exception as error:  # theirs are of any kind
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{path}: MidiTok gives up ({reason}). {remedy}") from error


def names_of(tokenizer: Any) -> list[str]:
    """In order of their ids."""
    return sorted(tokenizer.vocab, key=tokenizer.vocab.get)


def ids_of_folder(folder: Path) -> tuple[list[str], Iterator[list[int]]]:
    """Names in order of their ids, and the ids of each MIDI file below a folder."""
    tokenizer = midi_tokenizer()
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".mid", ".midi"))
    if not files:
        raise DataError(f"{folder} holds no MIDI files, named .mid or .midi. Name a folder that does.")

    def pieces() -> Iterator[list[int]]:
        for path in files:
            with naming(path, "Mend or remove the file."):
                ids = tokenizer(path).ids
            yield ids

    return names_of(tokenizer), pieces()


def made_up(num_pieces: int) -> tuple[list[str], Iterator[list[int]]]:
    """Names like MidiTok's, and pieces: in a major key a theme of two bars, and the theme again, moved along the scale.

    What a piece began with tells how it goes on: a model with memory has something to remember.
    """
    pitches = range(48, 85)
    names = ["PAD_None", "BOS_None", "EOS_None", "MASK_None", "Bar_None", *(f"Pitch_{pitch}" for pitch in pitches)]
    names += [*(f"Duration_0.{eighths}.8" for eighths in (2, 4)), *(f"Position_{place}" for place in range(0, 32, 4))]
    id_of = {name: i for i, name in enumerate(names)}

    def pieces() -> Iterator[list[int]]:
        for seed in range(num_pieces):
            chance = random.Random(seed)
            key = chance.randrange(12)
            scale = [pitch for pitch in pitches if (pitch - key) % 12 in MAJOR]
            theme = [
                [(place, chance.randrange(8)) for place in sorted(chance.sample(range(0, 32, 4), k=5))]
                for _ in range(2)
            ]
            words: list[str] = []
            for moved in chance.choices((0, 2, 4), k=8):
                for bar in theme:
                    words.append("Bar_None")
                    for place, degree in bar:
                        pitch, length = scale[degree + moved + 4], 4 if place % 8 == 0 else 2
                        words += [f"Position_{place}", f"Pitch_{pitch}", f"Duration_0.{length}.8"]
            yield [id_of[word] for word in words]

    return names, pieces()


def save(names: list[str], pieces: Iterator[list[int]], out: Path) -> None:
    """Write what `txl prepare` takes."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "names.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    count = 0
    with (out / "ids.jsonl").open("w", encoding="utf-8") as lines:
        for ids in pieces:
            lines.write(f"{json.dumps(ids)}\n")
            count += 1
    print(f"{out}: {count:,} pieces, {len(names):,} names")


def is_allowed(name: str, key: int) -> bool:
    """Whether a token may stand in a piece in this major key: of the pitches those of the scale; no special ones."""
    if name in ("PAD_None", "BOS_None", "EOS_None", "MASK_None", END_OF_TEXT):
        return False
    kind, _, value = name.partition("_")
    return kind != "Pitch" or (int(value) - key) % 12 in MAJOR


def write(model: str, *, scale: str, max_tokens: int, seed: int, out: Path | None) -> None:
    """Let a run or a bundle write a piece, of allowed tokens alone."""
    tokenizer = midi_tokenizer() if out is not None else None
    lm = txl_dist.load(model)
    names = lm.tokenizer.symbols
    if "Bar_None" not in names:
        raise ConfigError(
            f"{model} writes no music: Bar_None is not in its vocabulary. Name a run of docs/preparing-data.md."
        )
    if tokenizer is not None and [*names[: lm.tokenizer.end_of_text]] != names_of(tokenizer):  # end-of-text is the last
        raise ConfigError(f"{model} was not trained on this MidiTok's names, so there is no {out}. Leave out --out.")
    allowed = [i for i, name in enumerate(names) if is_allowed(name, NOTES.index(scale))]
    made = lm.generate("Bar_None", allowed=allowed, max_tokens=max_tokens, temperature=0.9, seed=seed)
    print(f"Bar_None{made.text}")
    if tokenizer is not None and out is not None:
        with naming(out, "Name another --out."):
            tokenizer.decode([names.index("Bar_None"), *made.ids]).dump_midi(out)
        print(f"{out}: written")


def main(words: list[str]) -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("ids", "made"):
        own = commands.add_parser(command)
        own.add_argument("--out", type=Path, required=True)
        if command == "ids":
            own.add_argument("folder", type=Path)
        else:
            own.add_argument("--pieces", type=int, default=400)
    own = commands.add_parser("write")
    own.add_argument("model")
    own.add_argument("--scale", choices=NOTES, default="C", help="major key whose pitches are allowed")
    own.add_argument("--max-tokens", type=int, default=120)
    own.add_argument("--seed", type=int, default=1)
    own.add_argument("--out", type=Path, help="MIDI file to write")
    given = parser.parse_args(words)
    if given.command == "write":
        write(given.model, scale=given.scale, max_tokens=given.max_tokens, seed=given.seed, out=given.out)
    else:
        save(*(ids_of_folder(given.folder) if given.command == "ids" else made_up(given.pieces)), given.out)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (TxlError, OSError) as error:
        sys.exit(f"music.py: error: {error}")
