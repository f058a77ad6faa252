"""Cells of text as numbers, booleans and dates, in the notations that people use."""

from __future__ import annotations

from datetime import date

import numpy as np
import pytest

from leanbayes.data.cells import calendar, notation_of, order_of, to_booleans, to_days, to_numbers


def cells(*texts):
    return np.array(texts, dtype=object)


@pytest.mark.parametrize(
    ("text", "notation", "value"),
    [
        ("1", "point", 1),
        ("-2.5e3", "point", -2500),
        ("12 %", "point", 12),
        ("12.5%", "point", 12.5),
        ("$1,200.50", "point", 1200.5),
        ("-$3", "point", -3),
        ("€ 5", "point", 5),
        ("7 €", "point", 7),
        ("1 234", "point", 1234),
        ("1'234.5", "point", 1234.5),
        ("1,234,567", "point", 1234567),
        (".5", "point", 0.5),
        ("2,5", "comma", 2.5),
        ("1.200,50", "comma", 1200.5),
        ("-3,25 %", "comma", -3.25),
        ("1 234,5", "comma", 1234.5),
        (",5", "comma", 0.5),
        ("2,5e3", "comma", 2500),
    ],
)
def test_numbers(text, notation, value):
    assert to_numbers(cells(text), notation) == [value]


@pytest.mark.parametrize(
    ("text", "notation"),
    [("1,5", "point"), ("1,50,000", "point"), ("1.5", "comma"), ("abc", "point"), ("", "point"), ("<5", "point"),
     ("1 2", "point"), ("5 kg", "point"), ("1..2", "point"), ("0,713", "point"), ("-0.713", "comma"),
     ("10_20", "point"), ("1" + " " * 40_000 + "x", "point")],
)  # fmt: skip
def test_no_numbers(text, notation):
    assert np.isnan(to_numbers(cells(text), notation)).all()


@pytest.mark.parametrize(
    ("texts", "notation"),
    [
        (("1", "2.5"), "point"),
        (("1,5", "2"), "comma"),
        (("1,500", "2,5"), "comma"),
        (("1,500", "0,713"), "comma"),
        (("1,500.5", "1,500"), "point"),
        (("1,234,567",), "point"),
        (("$1,500",), "point"),
        (("a,b",), "point"),
        (("1,500", "2,000"), None),
    ],
)
def test_the_decimal_sign_of_a_column(texts, notation):
    assert notation_of(cells(*texts)) == notation


def test_booleans():
    found = to_booleans(cells("TRUE", "yes", "t", "Y", "False", "no", "F", "n", "maybe", "1"))
    np.testing.assert_array_equal(found, [1, 1, 1, 1, 0, 0, 0, 0, np.nan, np.nan])


FEBRUARY = (date(2024, 2, 1) - date(1970, 1, 1)).days


@pytest.mark.parametrize(
    "text",
    ["2024-02-01", "2024/2/1", "2024.02.01", "2024-02", "2/1/2024", "02-01-2024", "2/1/24", "1 Feb 2024", "1. Feb 2024",
     "01-Feb-24", "1st February 2024", "Feb 1, 2024", "February 1 2024", "2024-02-01T00:00:00Z", "2024-02-01 00:00"],
)  # fmt: skip
def test_dates(text):
    assert to_days(cells(text)) == [FEBRUARY]


def test_times_are_fractions_of_days():
    texts = ("2024-02-01T12:00:00", "2024-02-01 12:00:00+02:00", "2/1/24 3:30 PM", "2024-02-01T12:00:00.5Z")
    assert to_days(cells(*texts)) - FEBRUARY == pytest.approx([1 / 2, 10 / 24, 15.5 / 24, 1 / 2])


@pytest.mark.parametrize(
    "text", ["2024-13-01", "2023-02-29", "x", "1/2", "20240201", "2024-02-01 25:00", "Foo 1, 2024"]
)
def test_no_dates(text):
    assert np.isnan(to_days(cells(text))).all()


def test_the_order_of_day_and_month():
    assert to_days(cells("1/2/2024"), "day") == [FEBRUARY]
    assert order_of(cells("13/2/2024", "1/2/2024")) == "day"
    assert order_of(cells("1.2.2024")) == "day"
    assert order_of(cells("2/13/2024", "1/2/2024")) == "month"
    assert order_of(cells("1/2/2024")) is None


def test_the_calendar_equals_that_of_python():
    days = np.arange(-30_000, 30_000, 977) + 0.25
    found = calendar(days)
    expected = [date.fromordinal(date(1970, 1, 1).toordinal() + int(np.floor(day))) for day in days]
    assert found["year"].tolist() == [day.year for day in expected]
    assert found["month"].tolist() == [day.month for day in expected]
    assert found["weekday"].tolist() == [day.weekday() for day in expected]
