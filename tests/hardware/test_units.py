import pytest

from meshcast.hardware import units

TABLE = [
    ("80 GiB", "bytes", 80 * 2**30), ("80 GB", "bytes", 80e9), ("81559 MiB", "bytes", 81559 * 2**20),
    ("1 kB", "bytes", 1000), ("900 GB/s", "bandwidth", 900e9), ("400 Gb/s", "bandwidth", 50e9),
    ("1 GiB/s", "bandwidth", 2**30), ("3.35TB/s", "bandwidth", 3.35e12), ("989 TFLOP/s", "flops", 989e12),
    ("2 PFLOP/s", "flops", 2e15), ("1.5 s", "time", 1.5), ("12 ms", "time", 0.012), ("0.6 us", "time", 0.6e-6),
    ("130 ns", "time", 130e-9), ("1410 MHz", "frequency", 1.41e9), ("1.98 GHz", "frequency", 1.98e9),
    ("700 W", "power", 700), ("132", "count", 132), (132, "count", 132), ("0.85", "ratio", 0.85),
    ("85 %", "ratio", 0.85), (0.85, "ratio", 0.85), ("1e3 GB/s", "bandwidth", 1e12),
]  # fmt: skip


@pytest.mark.parametrize(("text", "dimension", "expected"), TABLE)
def test_parse(text: str, dimension: str, expected: float) -> None:
    assert units.parse(text, dimension) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("text", "dimension", "message"), [
    ("900", "bandwidth", "needs its unit. Units: B/s"), (900, "bandwidth", "needs its unit"),
    ("900 GB", "bandwidth", "'GB' is not a unit of bandwidth"), ("900 gb/s", "bandwidth", "'gb/s' is not a unit"),
    ("fast", "bandwidth", "not a number with a unit. Write it like '450 GB/s'"), ("", "bytes", "not a number"),
    ("1 2 GB", "bytes", "not a number"), ("-1 s", "time", "not negative"), ("1e999 s", "time", "finite"),
    (float("nan"), "ratio", "not a number"), (float("inf"), "count", "not a number"),
    ("1e-300 Gb/s", "bandwidth", "a bandwidth quantity is from 1 B/s to 1e+18 B/s"),
    ("1e30 W", "power", "from 0.001 W to 1e+12 W"), (1e-9, "ratio", "from 1e-06 to 1e+06"),
    ("8 GPUs", "count", "Write a bare number"), ("8.5", "count", "a count is whole"),
    (True, "count", "text with a unit"), (None, "bytes", "text with a unit"), (["1 s"], "time", "text with a unit"),
])  # fmt: skip
def test_parse_refuses(text: object, dimension: str, message: str) -> None:
    with pytest.raises(ValueError) as e:
        units.parse(text, dimension)  # type: ignore[arg-type]
    assert message in str(e.value)
    assert ". " in str(e.value), "a rule and a remedy"


@pytest.mark.parametrize("word", ["", "²", "٣", "-1", "1.0", " 1", "1_0", "9" * 19, "9" * 5000])
def test_words_that_are_no_numbers(word: str) -> None:
    """`str.isdigit` and `int` disagree about some of them."""
    assert units.read_digits(word) is None


def test_words_that_are_numbers() -> None:
    assert [units.read_digits(word) for word in ("0", "007", "9" * 18)] == [0, 7, 10**18 - 1]
