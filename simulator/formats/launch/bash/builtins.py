"""Commands that only compute or print, which a script uses in ``$( )`` and in pipes."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping

from meshcast.hardware.documents.input_file import split_lines
from meshcast.simulator.formats.launch.bash.arithmetic import Formula
from meshcast.simulator.formats.launch.bash.expansion import unescape_ansi
from meshcast.simulator.formats.launch.bash.files import read_file, resolve
from meshcast.simulator.formats.launch.bash.state import MAX_ROUNDS, Shell
from meshcast.simulator.formats.launch.bash.values import (
    Segment,
    Value,
    is_resolved,
    name_unknown,
    read_as_bash,
)

Print = Callable[[Shell, list[Value]], Value | None]
"""Returns what a command prints; None where that is not known."""


def _as_value(shell: Shell, text: str) -> Value:
    return (Segment(text, shell.limits.line),)


def _join(shell: Shell, values: list[Value]) -> Value:
    segments: list[Segment] = []
    for index, value in enumerate(values):
        segments += [Segment(" ", shell.limits.line)] if index else []
        segments += value
    return tuple(segments)


def _echo(shell: Shell, words: list[Value]) -> Value | None:
    options = ""
    while words and re.fullmatch(r"-[neE]+", read_as_bash(words[0])):
        options += read_as_bash(words[0])[1:]
        words = words[1:]
    printed = _join(shell, words)
    if "e" in options:
        if name_unknown(printed):
            return None
        printed = _as_value(shell, unescape_ansi(read_as_bash(printed)))
    return printed if "n" in options else (*printed, Segment("\n", shell.limits.line))


def _printf(shell: Shell, words: list[Value]) -> Value | None:
    """Prints by a format of ``%s``, ``%d`` and ``%0Nd``, again for what is left of the words."""
    if not words or not is_resolved(words[0]):
        return None
    pieces, values = re.split(r"(%(?:0?\d)?[sd%])", read_as_bash(words[0])), words[1:]
    count = sum(piece[-1] in "sd" for piece in pieces[1::2])
    if any("%" in piece for piece in pieces[::2]):
        return None
    printed: list[Segment] = []
    for start in range(0, max(len(values), 1), max(count, 1)):
        round_values = iter(values[start : start + count])
        for place, piece in enumerate(pieces):
            if place % 2 == 0 or piece == "%%":
                printed.append(Segment(unescape_ansi(piece.replace("%%", "%")), shell.limits.line))
            elif (value := _format(shell, piece, next(round_values, ()))) is not None:
                printed += value
            else:
                return None
        if not count:
            break
    return tuple(printed)


def _format(shell: Shell, piece: str, value: Value) -> Value | None:
    """Returns a word as a piece of a format such as ``%02d`` prints it; None where that is not known."""
    width, kind = piece[1:-1], piece[-1]
    if name_unknown(value):
        return value if kind == "s" and not width else None
    text = read_as_bash(value) or ("0" if kind == "d" else "")
    if kind == "d" and not re.fullmatch(r"-?[1-9]\d*|0", text):
        return None
    filled = text.rjust(int(width or 0), "0" if width.startswith("0") and kind == "d" else " ")
    return (Segment(filled, shell.limits.line),)


def _cat(shell: Shell, words: list[Value]) -> Value | None:
    names = [read_as_bash(word) for word in words if read_as_bash(word) != "-"]
    if not names:
        return shell.stdin
    texts = [read_file(shell, name) for name in names]
    return None if None in texts else _as_value(shell, "".join(text or "" for text in texts))


def _seq(shell: Shell, words: list[Value]) -> Value | None:
    texts = [read_as_bash(word) for word in words]
    if not 1 <= len(texts) <= 3 or not all(re.fullmatch(r"-?\d{1,12}", text) for text in texts):
        return None
    numbers = [int(text) for text in texts]
    first, step = (numbers[0] if len(numbers) > 1 else 1), (numbers[1] if len(numbers) == 3 else 1)
    if not step:
        return None
    span = range(first, numbers[-1] + (1 if step > 0 else -1), step)
    if len(span) > MAX_ROUNDS:
        raise shell.limits.refuse(f"seq counts {len(span):,} numbers; at most {MAX_ROUNDS:,} are followed")
    return _as_value(shell, "".join(f"{number}\n" for number in span))


def _path(change: Callable[[str], str]) -> Print:
    def print_path(shell: Shell, words: list[Value]) -> Value | None:
        paths = [word for word in words if not read_as_bash(word).startswith("-")]
        if len(paths) != 1 or name_unknown(paths[0]):
            return None
        return _as_value(shell, f"{change(read_as_bash(paths[0]))}\n")

    return print_path


def _basename(shell: Shell, words: list[Value]) -> Value | None:
    texts = [read_as_bash(word) for word in words]
    if not 1 <= len(texts) <= 2 or any(map(name_unknown, words)) or texts[0].startswith("-"):
        return None
    name = posixpath.basename(texts[0].rstrip("/")) or texts[0][:1]
    if len(texts) == 2 and name != texts[1]:
        name = name.removesuffix(texts[1])
    return _as_value(shell, f"{name}\n")


def _pwd(shell: Shell, words: list[Value]) -> Value | None:
    return _as_value(shell, f"{resolve(shell, '.')}\n")


def _filter(change: Callable[[str, list[str]], str | None]) -> Print:
    """Returns a command that prints what it makes of the text that it reads."""

    def print_changed(shell: Shell, words: list[Value]) -> Value | None:
        if shell.stdin is None or name_unknown(shell.stdin) or any(map(name_unknown, words)):
            return None
        text = read_as_bash(shell.stdin)
        shell.limits.spend(len(text))
        changed = change(text, [read_as_bash(word) for word in words])
        return None if changed is None else _as_value(shell, changed)

    return print_changed


def _translate(text: str, words: list[str]) -> str | None:
    """Returns what ``tr`` makes of a text: letters or classes for others, or -d."""
    ranges = {"[:upper:]": "A-Z", "[:lower:]": "a-z", "[:space:]": " \\n\\t", "a-z": "a-z", "A-Z": "A-Z"}
    plain = [unescape_ansi(ranges.get(word, word)) for word in words]
    if len(words) == 2 and words[0] == "-d" and "-" not in plain[1][1:] and "[" not in plain[1]:
        return "".join(letter for letter in text if letter not in plain[1])
    if plain == ["A-Z", "a-z"]:
        return text.lower()
    if plain == ["a-z", "A-Z"]:
        return text.upper()
    if len(plain) == 2 and len(plain[0]) == len(plain[1]) == 1:
        return text.replace(plain[0], plain[1])
    return None


_SUBSTITUTION = re.compile(r"s([/|#,@:])((?:(?!\1)[^\\\n])+)\1((?:(?!\1)[^\\&\n])*)\1(g?)")


def _edit(shell: Shell, words: list[Value]) -> Value | None:
    """Prints what ``sed s/WORD/VALUE/ [FILE]`` makes of a text, or writes it with ``-i``.

    Patterns that are no plain words are not followed; what then is in the files that it writes is not known.
    """
    in_place = bool(words) and read_as_bash(words[0]) == "-i"
    program, *files = (words[1:] if in_place else words) or [()]
    if not in_place:
        return _substitute(shell, program, _cat(shell, files))
    for file in files:
        name, changed = read_as_bash(file), _substitute(shell, program, _cat(shell, [file]))
        if changed is None:
            shell.files.pop(name, None)
        else:
            shell.write_file(name, changed, append=False)
    return ()


def _substitute(shell: Shell, program: Value, value: Value | None) -> Value | None:
    """Returns what a program of sed makes of a text; None where that is not known."""
    rule = _SUBSTITUTION.fullmatch(read_as_bash(program))
    if value is None or rule is None or re.search(r"[][.*^$]", rule[2]) or name_unknown((*program, *value)):
        return None
    text = read_as_bash(value)
    shell.limits.spend(len(text))
    count = -1 if rule[4] else 1
    return _as_value(shell, "\n".join(line.replace(rule[2], rule[3], count) for line in text.split("\n")))


def _cut_columns(text: str, words: list[str]) -> str | None:
    """Returns what ``cut -d X -f N`` makes of a text."""
    options = re.fullmatch(r"-d ?(.) ?-f ?(\d{1,3})|-f ?(\d{1,3}) ?-d ?(.)", " ".join(words))
    if options is None:
        return None
    sign, number = options[1] or options[4], int(options[2] or options[3])
    lines = split_lines(text)
    rows = [line.split(sign) if sign in line else None for line in lines]
    chosen = [
        line if parts is None else parts[number - 1] if 0 < number <= len(parts) else ""
        for line, parts in zip(lines, rows, strict=True)
    ]
    return "".join(f"{part}\n" for part in chosen)


_COLUMN = re.compile(r"\{ ?print \$(\d{1,3});? ?\}")


def _print_column(text: str, words: list[str]) -> str | None:
    """Returns what ``awk '{print $N}'`` makes of a text, also with a sign between columns (``-F X``)."""
    *options, program = words or [""]
    sign = re.fullmatch(r"-F ?([^\\|.*+?^$(){}\[\] ])", " ".join(options))
    column = _COLUMN.fullmatch(program.strip())
    if column is None or bool(options) != bool(sign):
        return None
    number = int(column[1])
    rows = [(line, line.split(sign[1]) if sign else line.split()) for line in text.splitlines()]
    return "".join(f"{line if not number else row[number - 1] if number <= len(row) else ''}\n" for line, row in rows)


def _head(text: str, words: list[str]) -> str | None:
    count = re.fullmatch(r"-n ?(\d{1,6})|-(\d{1,6})", " ".join(words) or "-10")
    return "".join(f"{line}\n" for line in split_lines(text)[: int(count[1] or count[2])]) if count else None


def _count(text: str, words: list[str]) -> str | None:
    counts = {"-l": text.count("\n"), "-w": len(text.split()), "-c": len(text.encode())}
    return f"{counts[words[0]]}\n" if len(words) == 1 and words[0] in counts else None


def _compute(formula: str) -> str | None:
    """Returns the number that a formula without variables makes; None if it makes none."""
    formula = formula.strip()
    if not re.fullmatch(r"[\d\s()+*/%<>=!&|-]+", formula):
        return None

    def refuse(name: str, value: int = 0) -> int:
        raise ArithmeticError(name)

    try:
        return f"{Formula(formula, refuse, refuse).compute()}\n"
    except ArithmeticError:
        return None


def _expr(shell: Shell, words: list[Value]) -> Value | None:
    if not words or any(map(name_unknown, words)):
        return None
    number = _compute(" ".join(read_as_bash(word) for word in words))
    return None if number is None else _as_value(shell, number)


PRINTING: Mapping[str, Print] = {
    "echo": _echo,
    "printf": _printf,
    "cat": _cat,
    "seq": _seq,
    "dirname": _path(lambda path: posixpath.dirname(path.rstrip("/")) or ("/" if path.startswith("/") else ".")),
    "basename": _basename,
    "realpath": _path(posixpath.normpath),
    "readlink": _path(posixpath.normpath),
    "pwd": _pwd,
    "sed": _edit,
    "expr": _expr,
    "bc": _filter(lambda text, words: _compute(text)),
    "tr": _filter(_translate),
    "cut": _filter(_cut_columns),
    "awk": _filter(_print_column),
    "head": _filter(_head),
    "wc": _filter(_count),
    "xargs": _filter(lambda text, words: None if words else f"{' '.join(text.split())}\n"),
    "sort": _filter(lambda text, words: None),
}
"""Commands by their names. They are no programs that a script starts."""
