"""Tables as text: headers, separators of cells, and refusals."""

from __future__ import annotations

import pytest

from leanbayes import data
from leanbayes.data.files.csv import read_features, read_table


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


HEADERS = {
    "text over numbers": ("a,b\n1,2\n3,4\n", True),
    "numbers": ("1,2\n3,4\n5,6\n", False),
    "labels": ("1,u\n2,v\n3,u\n", False),
    "counted": ("0,1,2\n7,8,9\n1,2,3\n", True),
    "counted and a word": ("0,1,2,label\n.5,.5,.5,u\n.5,.5,.5,v\n", True),
    "a word and counted": ("label,0,1,2\nu,.5,.5,.5\nv,.5,.5,.5\n", True),
    "two counted": ("0,1\n0.5,1.5\n2.5,3.5\n", True),
    "two that are a row": ("0,1\n1,2\n2,3\n", False),
    "one counted and a word": ("0,label\n0.5,u\n1.5,u\n", True),
    "a word that comes again": ("0,1,2,u\n.5,.5,.5,u\n.5,.5,.5,v\n", False),
    "counted from one": ("1,2,3\n4,5,6\n7,8,9\n", False),
    "counted as decimals": ("0.0,1.0,2.0\n4,5,6\n7,8,9\n", False),
    "wavelengths": ("400,410,label\n.1,.2,u\n.3,.4,v\n.5,.6,u\n.7,.8,v\n", True),
    "a lone label over decimals": ("0.1,0.2,w\n.1,.2,u\n.3,.4,u\n", False),
    "a lone label of whole numbers": ("4,5,w\n4,6,u\n1,2,u\n", False),
    "lone labels": ("4,5,w\n.4,.6,u\n.1,.2,v\n", False),
    "a single row": ("0,1,2\n", False),
    "a single row of words": ("a,b,c\n", True),
}


@pytest.mark.parametrize("case", HEADERS)
def test_which_first_row_is_a_header(tmp_path, case):
    text, titled = HEADERS[case]
    table = read_table(write(tmp_path / "mine.csv", text), 1)
    assert table.titled == titled
    lines = text.splitlines()
    assert len(table) == len(lines) - titled
    assert (table.header == lines[0].split(",")) == titled


def test_a_header_of_numbers_is_no_row_of_data(tmp_path):
    rows = "".join(f"{i / 7},{i % 5},{i % 3},{'uv'[i % 2]}\n" for i in range(40))
    mine = data.load(write(tmp_path / "mine.csv", "0,1,2,label\n" + rows))
    assert mine.classes == ("u", "v")
    assert len(mine.train) + len(mine.test) == 40


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b,a,b,c\n1,2,3,4,5\n6,7,8,9,0\n", r"mine\.csv has more than one column named 'a', 'b'; expected names"),
        (
            'a,b\n"1,500",2.5\n"2,500",3.5\n"3,500",1.5\n',
            r"mine\.csv, column 'a': expected numbers with a decimal point, got '\d,500', .*--types a=comma or",
        ),
        (
            'a,b\n2.5,"1,500"\n3.5,"2,500"\n',
            r"mine\.csv, column 'b': expected numbers with a decimal point, .*--types b=comma or --types b=number",
        ),
        (
            'a,b\n1,u\n2,"v\n3,w\n',
            r"mine\.csv, line 3: expected .*closed quotation marks, got a quotation mark that stays open",
        ),
        (
            'a,b\n1,u\n"2,' + "v" * 140_000,
            r"mine\.csv, line 3: expected .*closed quotation marks, got more than 131,072 characters",
        ),
        ('a,b\n1,"u\nu"\n2,"v\nv",3\n', r"mine\.csv, line 4: expected 2 cells as in the first line, got 3"),
    ],
    ids=["repeated names", "comma", "comma of the target", "open quote", "long open quote", "line of a long row"],
)
def test_what_is_refused(tmp_path, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        data.load(write(tmp_path / "mine.csv", text))


def test_repeated_names_are_refused_in_rows_to_predict(tmp_path):
    with pytest.raises(ValueError, match="more than one column named 'a'"):
        read_features(write(tmp_path / "new.csv", "a,a\n1,2\n"))


def test_a_column_that_float32_cannot_keep_is_named(tmp_path):
    rows = "".join(f"{1_700_000_000 + 2 * i},{i / 3}\n" for i in range(60))
    path = write(tmp_path / "mine.csv", "time,price\n" + rows)
    for target in ("price", "time"):
        with pytest.raises(ValueError, match=r"mine\.csv, column 'time' has values about 1700000059 with"):
            data.load(path, target=target)


def test_quoted_separators_and_line_ends_are_text(tmp_path):
    text = '\n"a, b, c";"d, e";label\n' + '0.5;1.5;"u, or\nso"\n0.5;2.5;v\n' * 5
    mine = data.load(write(tmp_path / "mine.csv", text))
    assert (mine.input_shape, mine.classes) == ((2,), ("u, or\nso", "v"))


def test_separators_at_the_ends_of_lines_are_no_column(tmp_path):
    rows = "".join(f"{i},{i / 3},,\n" for i in range(12))
    mine = data.load(write(tmp_path / "mine.csv", "a,b,,\n" + rows))
    assert (mine.input_shape, mine.task) == ((1,), "regression")
    gap = write(tmp_path / "gap.csv", "a,b\n" + "1,\n" * 5)  # a named column that is empty is a gap
    with pytest.raises(ValueError, match="column 'b' has no target, 5 gaps in 5 rows"):
        data.load(gap)
