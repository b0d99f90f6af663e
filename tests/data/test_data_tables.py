"""CSV and TSV: rows are texts with a class, or one token per column; errors say what is wrong."""

import csv
import gzip
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.data import (
    ByteTokenizer,
    CharacterTokenizer,
    Corpus,
    FileFormatError,
    TableTokenizer,
    load_corpus,
    load_tokenizer,
    save_tokenizer,
)

quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
NUMBERS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=80)
TEXTS = [("a fine film", "pos"), ('dull, "very" dull', "neg"), ("né\nin two lines", "pos")]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def texts_of(corpus):
    return [corpus.tokenizer.decode(example["tokens"]) for example in corpus]


def named(corpus):
    return [corpus.classes[example["label"]] for example in corpus]


# Texts.


@pytest.mark.parametrize("tokenizer", ["auto", "characters"])
def test_rows_of_texts_are_what_pandas_reads(tmp_path, tokenizer):
    path = tmp_path / "reviews.csv"
    pd.DataFrame(TEXTS, columns=["review", "sentiment"]).to_csv(path, index=False)
    corpus = load_corpus(path, tokenizer=tokenizer)
    theirs = pd.read_csv(path)
    assert corpus.kind == "text"
    assert texts_of(corpus) == theirs["review"].tolist()
    assert named(corpus) == theirs["sentiment"].tolist()
    assert corpus.classes == tuple(sorted(theirs["sentiment"].unique()))
    assert corpus.names == ["reviews.csv[0]", "reviews.csv[1]", "reviews.csv[2]"]
    assert corpus.num_bytes == sum(len(text.encode()) for text in theirs["review"])
    assert pickle.loads(pickle.dumps(corpus))[2]["label"] == corpus[2]["label"]


def test_tabs_separate_and_quotation_marks_are_text(tmp_path):
    path = write(tmp_path / "train.tsv", "sentence\tlabel\n\" a mess , \"\t0\n`` fine ''\t1\n")
    corpus = load_corpus(path)
    assert texts_of(corpus) == ['" a mess , "', "`` fine ''"]
    assert named(corpus) == ["0", "1"]


def test_the_columns_text_and_label_are_found_among_others(tmp_path):
    path = write(tmp_path / "a.csv", "Label,id,Text\nno,1,to be\nyes,2,or not\n")
    corpus = load_corpus(path)
    assert (texts_of(corpus), named(corpus)) == (["to be", "or not"], ["no", "yes"])
    table = load_corpus(path, kind="table")
    assert table.tokenizer.names == ("id", "Text")
    assert named(table) == ["no", "yes"]


def test_a_single_column_is_texts_without_classes(tmp_path):
    corpus = load_corpus(write(tmp_path / "a.csv", "text\nto be\nor not\n"))
    assert (texts_of(corpus), corpus.classes) == (["to be", "or not"], ())
    assert "label" not in corpus[0]


def test_folders_of_texts_are_classes_if_there_are_two(tmp_path):
    for name in ("pos", "neg"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "1.txt", name * 2)
    corpus = load_corpus(tmp_path)
    assert corpus.classes == ("neg", "pos")
    assert texts_of(corpus) == [2 * name for name in named(corpus)]
    write(tmp_path / "readme.txt", "of no class")
    assert load_corpus(tmp_path).classes == ()
    (tmp_path / "readme.txt").unlink()
    other = load_corpus(tmp_path, classes=["pos", "neg"])
    assert named(other) == named(corpus)
    assert other[0]["label"] == 1 - corpus[0]["label"]
    with pytest.raises(FileFormatError, match="folder 'neg', which is none of the classes pos, no"):
        load_corpus(tmp_path, classes=["pos", "no"])


def test_classes_that_are_numbers_come_in_their_order(tmp_path):
    path = write(tmp_path / "a.tsv", "text\tlabel\n" + "".join(f"t\t{n}\n" for n in (10, 9, -1)))
    assert load_corpus(path).classes == ("-1", "9", "10")


def test_files_are_joined_if_their_columns_are_the_same(tmp_path):
    write(tmp_path / "a.csv", "text,label\nto be,1\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"text,label\nor not,0\n"))
    corpus = load_corpus(tmp_path)
    assert (texts_of(corpus), named(corpus)) == (["to be", "or not"], ["1", "0"])
    write(tmp_path / "c.csv", "text,class\nto be,1\n")
    with pytest.raises(FileFormatError, match="all files must have the same columns"):
        load_corpus(tmp_path)


# Tables.


@quick
@given(numbers=NUMBERS, bins=st.integers(2, 20))
def test_bins_are_in_order_and_hold_about_equally_many(numbers, bins):
    numbers = [float(x) for x in numbers]
    tokenizer = TableTokenizer.fit(["x"], [[repr(x)] for x in numbers], bins=bins)
    tokens = [int(tokenizer.encode(repr(x))) for x in sorted(numbers)]
    assert tokens == sorted(tokens)
    assert 1 <= tokens[0] <= tokens[-1] < tokenizer.vocab_size <= bins + 1
    distinct = len(set(numbers))
    if distinct <= bins:  # numbers and tokens are one to one
        assert len(set(tokens)) == distinct == tokenizer.vocab_size - 1
    elif distinct == len(numbers):
        counts = np.bincount(tokens)[1:]
        assert counts.max() <= np.ceil(len(numbers) / bins) + 1


def test_the_tokens_of_a_table_are_what_pandas_cuts(tmp_path):
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": random.normal(50, 9, 200).round(2),
            "stage": random.integers(0, 4, 200),
            "sex": random.choice(["m", "f"], 200),
            "target": random.integers(0, 2, 200),
        }
    )
    frame.loc[[3, 7], "age"] = np.nan
    path = tmp_path / "a.csv"
    frame.to_csv(path, index=False)
    corpus = load_corpus(path)
    assert (corpus.kind, len(corpus), corpus.classes) == ("table", 200, ("0", "1"))
    rows = torch.stack([example["tokens"] for example in corpus])
    age = pd.cut(
        frame["age"],
        [-np.inf, *np.quantile(frame["age"].dropna(), np.arange(1, 16) / 16), np.inf],
        right=False,
        labels=False,
    )
    assert rows[:, 0].tolist() == (age + 1).fillna(0).astype(int).tolist()
    assert (rows[:, 1] - 17 - 1).tolist() == frame["stage"].tolist()
    assert (rows[:, 2] - 17 - 5 - 1).tolist() == (frame["sex"] == "m").astype(int).tolist()
    assert corpus.tokenizer.vocab_size == 17 + 5 + 3
    assert [example["label"] for example in corpus] == frame["target"].tolist()
    assert next(csv.reader([corpus.names[0]]))[2] == frame["sex"][0]


def test_missing_cells_unseen_values_and_text_among_numbers_are_unknown():
    tokenizer = TableTokenizer.fit(["x", "c"], [["1", "a"], ["2", " b  c "], ["?", ""]])
    assert tokenizer.encode("1.4,a").tolist() == [1, 4]
    assert tokenizer.encode("1.5,b c").tolist() == [2, 5]  # the border belongs to the bin above
    for x in ("?", "", "NA", "nan", "three", "inf"):
        assert tokenizer.encode(f"{x},new").tolist() == [0, 3]
    assert tokenizer.decode([0, 3]) == "x unknown, c unknown"
    assert tokenizer.decode([1, 2, 4]) == "x < 1.5, 1.5 <= x, c = a"
    empty = TableTokenizer.fit(["x"], [["?"], [""]])
    assert (empty.vocab_size, empty.encode("7").tolist()) == (1, [0])


@pytest.mark.parametrize("edge", [5e-324, 1e308, -1e308])
def test_borders_between_extreme_numbers_are_finite(edge):
    tokenizer = TableTokenizer.fit(["x"], [[repr(edge)], ["1.5e308"], ["0"]])
    assert all(np.isfinite(tokenizer.columns[0].edges))
    places = [
        int(tokenizer.encode(cell)) for cell in sorted([repr(edge), "1.5e308", "0"], key=float)
    ]
    assert places == sorted(places)


def test_names_of_columns_are_found_or_numbers(tmp_path):
    with_names = load_corpus(write(tmp_path / "a.csv", "age,sex,y\n63,m,1\n37,f,0\n"))
    assert with_names.tokenizer.names == ("age", "sex")
    without = load_corpus(write(tmp_path / "b.csv", "63,m,1\n37,f,0\n"))
    assert (without.tokenizer.names, len(without)) == (("1", "2"), 2)
    counted = load_corpus(write(tmp_path / "c.csv", "2,2\n63,1,1\n37,2,0\n"))  # of scikit-learn
    assert (counted.tokenizer.names, len(counted)) == (("1", "2"), 2)
    years = load_corpus(write(tmp_path / "e.csv", "2019,2020,Label\n63,1,x\n37,2,y\n"))
    assert (years.tokenizer.names, years.classes) == (("2019", "2020"), ("x", "y"))
    nameless = load_corpus(write(tmp_path / "f.csv", "63,1\n37,2\n"), kind="table")
    assert (nameless.tokenizer.names, nameless.classes) == (("1",), ("1", "2"))
    named_otherwise = load_corpus(write(tmp_path / "d.data", "63,m,1\n37,f,0\n"), kind="table")
    assert torch.equal(named_otherwise[1]["tokens"], without[1]["tokens"])


def test_a_tokenizer_is_saved_compared_and_used_again(tmp_path):
    path = write(tmp_path / "a.csv", "age,sex,y\n63,m,1\n37,f,0\n50,f,0\n")
    corpus = load_corpus(path, cache=tmp_path / "cache")
    save_tokenizer(corpus.tokenizer, tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again == corpus.tokenizer == Corpus(corpus._folder).tokenizer
    assert hash(again) == hash(corpus.tokenizer)
    assert again != TableTokenizer.fit(["age", "sex"], [["1", "m"]])
    other = write(tmp_path / "b.csv", "age,sex,y\n36,m,1\n70,f,0\n")
    for tokenizer in (again, tmp_path / "tokenizer.json"):
        assert [row["tokens"].tolist() for row in load_corpus(other, tokenizer=tokenizer)] == [
            again.encode("36,m").tolist(),
            again.encode("70,f").tolist(),
        ]
    reordered = write(tmp_path / "c.csv", "sex,age,y\nm,36,1\nf,70,0\n")
    with pytest.raises(FileFormatError, match=r"must have the columns of the tokenizer \(age, sex"):
        load_corpus(reordered, tokenizer=again)


def test_other_data_gets_the_numbers_of_given_classes(tmp_path):
    # One class alone would otherwise be class 0, whatever it is.
    write(tmp_path / "a.csv", "x,z,y\n1,1,no\n2,2,yes\n")
    only = write(tmp_path / "b.csv", "x,z,y\n1,1,yes\n2,2,yes\n")
    for cache in (None, tmp_path / "cache"):
        assert load_corpus(only, cache=cache)[0]["label"] == 0
        assert load_corpus(only, classes=["no", "yes"], cache=cache)[0]["label"] == 1
    with pytest.raises(
        FileFormatError, match="label 'yes', which is none of the classes no, maybe"
    ):
        load_corpus(only, classes=["no", "maybe"])
    for classes in ("yes", ["yes", "yes"], [0, 1]):
        with pytest.raises(ValueError, match="classes must be at least two different texts"):
            load_corpus(only, classes=classes)


def test_equal_rows_are_never_in_two_parts_though_bins_are_coarse(tmp_path):
    random = np.random.default_rng(0)
    rows = [f"{a},{b},{n % 2}" for n, (a, b) in enumerate(random.integers(0, 40, (300, 2)))]
    path = write(tmp_path / "a.csv", "a,b,label\n" + "\n".join([*rows, *rows]) + "\n")
    corpus = load_corpus(path)
    coarse = TableTokenizer.fit(["a", "b"], [["1", "1"], ["39", "39"]])
    parts = ga.data.split_corpus(corpus, validation=0.2, test=0.2)
    again = ga.data.split_corpus(load_corpus(path, tokenizer=coarse), validation=0.2, test=0.2)
    seen = {}
    for name, part in parts.items():
        assert torch.equal(part.spans, again[name].spans)
        for record in part.spans[:, 0].tolist():
            assert seen.setdefault(corpus.names[record], name) == name
        assert 0.1 < len(part) / len(corpus) < 0.7


@pytest.mark.parametrize(
    ("name", "text", "options", "says"),
    [
        ("a.csv", "a,b,c\n1,2,3\n1,2\n", {}, "row 3 has 2 columns, but the rows before it have 3"),
        ("a.csv", "a,b\n", {}, "at least two rows"),
        ("a.csv", "", {}, "at least two rows|is empty"),
        ("a.csv", "text,label\nto be,\nnot,1\n", {}, "without a label in column 'label': to be"),
        ("a.csv", "text,label\n,0\nnot,1\n", {}, "row without a text"),
        ("a.csv", 'text,label\n"open,0\nnot,1\n', {}, "cannot be read as CSV"),
        ("a.csv", "a\0,b\nc,d\n", {}, "holds a NUL byte"),
        ("a.csv", "a,b,c\n1,2,3\n", {"kind": "text"}, "must have a column 'text', or only two"),
        ("a.data", "a;b\n1;2\n", {"kind": "table"}, r"separated by commas \(.csv\) or by tabs"),
        ("a.csv", "a,b,c\n1,2,3\n", {"tokenizer": "bytes"}, "'auto' or a TableTokenizer"),
        ("a.csv", "a,b,c\n1,2,3\n", {"kind": "protein"}, "holds no fasta files"),
        ("a.csv", "a,label,label\n1,2,3\n", {}, "must have one column 'label', but it has 2"),
        ("a.csv", "x,o,win\no,o,win\nx,x,no\n", {}, "'win' as a label and in its first row"),
        ("a.csv", "so so,bad\noh,bad\nah,no\n", {}, "'bad' as a label and in its first row"),
        ("a.csv", "age;sex;y\n1;m;0\n", {}, "to be separated by semicolons"),
        ("a.tsv", "text,label\nto be,0\n", {}, "to be separated by commas"),
        ("a.csv", "A title\na,b,y\n1,2,x\n", {}, r"row 1 has 1 columns \(A title\), but row 2 has"),
        ("a.csv", "a,b,label,\n1,2,x\n", {}, r"row 1 has 4 columns \(a, b, label, \), but row 2"),
        ("a.csv", 'text,label\na,0\n"b" c,1\n', {}, "line 3: cannot be read as CSV"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, text, options, says):
    with pytest.raises(ValueError, match=says):
        load_corpus(write(tmp_path / name, text), **options)


def test_a_text_may_be_longer_than_the_limit_of_pythons_csv(tmp_path):
    limit = csv.field_size_limit()
    long = "ab" * limit
    corpus = load_corpus(write(tmp_path / "a.csv", f"text,label\n{long},x\nc,y\n"))
    assert corpus.lengths.tolist() == [2 * limit, 1]
    assert csv.field_size_limit() == limit


def test_infinity_is_unknown_among_numbers_and_adjacent_numbers_have_a_border():
    tokenizer = TableTokenizer.fit(["a"], [["1"], ["3"], [" inf "], ["-Infinity"], ["?"]])
    assert tokenizer.columns[0].edges == (2.0,)
    cells = ("1", "3", "inf", "-inf", "nan")
    assert [int(tokenizer.encode(cell)) for cell in cells] == [1, 2, 0, 0, 0]
    low, high = 1.0, float(np.nextafter(1.0, 2.0))
    adjacent = TableTokenizer.fit(["a"], [[repr(low)], [repr(high)]])
    assert [int(adjacent.encode(repr(x))) for x in (low, high)] == [1, 2]


def test_columns_that_contradict_themselves_are_named():
    column = ga.data.TableColumn
    assert hash(column("a", edges=[1, 2])) == hash(column("a", edges=(1.0, 2.0)))
    for options, says in (
        ({"edges": (2.0, 1.0)}, "edges must be ascending"),
        ({"edges": (1.0,), "values": ("x",)}, "values must be empty"),
        ({"values": ("x", "x")}, "values must be different"),
    ):
        with pytest.raises(ValueError, match=says):
            column("a", **options)
    with pytest.raises(ValueError, match="must contain TableColumns, got 'a'"):
        TableTokenizer(["a"])
    with pytest.raises(ValueError, match=r"must contain texts.*got 63 in row 0"):
        TableTokenizer.fit(["age"], [[63]])
    with pytest.raises(ValueError, match="must be a line of CSV, got list"):
        TableTokenizer.fit(["age"], [["63"]]).encode(["63"])


def test_a_table_tokenizer_reads_no_text_and_bad_arguments_are_named(tmp_path):
    tokenizer = TableTokenizer.fit(["a"], [["1"], ["2"]])
    for name, text in (("a.txt", "to be"), ("a.csv", "text,label\nto be,1\nnot,0\n")):
        with pytest.raises(ValueError, match=r"must be one of text|columns of the token"):
            load_corpus(write(tmp_path / name, text), tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"a row must have 1 cells \(a\), got 2"):
        tokenizer.encode("1,2")
    with pytest.raises(ValueError, match="rows must have 2 cells each"):
        TableTokenizer.fit(["a", "b"], [["1"]])
    with pytest.raises(ValueError, match="bins must be >= 2"):
        TableTokenizer.fit(["a"], [["1"]], bins=1)
    with pytest.raises(ValueError, match="at least one TableColumn"):
        TableTokenizer([])
    with pytest.raises(ValueError, match="tokens must be integers from 0 to 2"):
        tokenizer.decode([3])
    for columns in ("[]", '[{"name": "a"}]', '["a"]', '[{"name": "a", "edges": ["x"]}]'):
        saved = write(tmp_path / "t.json", f'{{"type": "TableTokenizer", "columns": {columns}}}')
        with pytest.raises(FileFormatError, match=str(saved)):
            load_tokenizer(saved)


def test_texts_of_files_take_the_other_tokenizers(tmp_path):
    path = write(tmp_path / "a.csv", "text,label\nto be,1\nor not,0\n")
    assert load_corpus(path).tokenizer == ByteTokenizer()
    made = load_corpus(path, tokenizer="characters").tokenizer
    assert made == CharacterTokenizer.from_text("to beor not")
    with pytest.raises(FileFormatError, match="not in the tokenizer's vocabulary"):
        load_corpus(write(tmp_path / "b.csv", "text,label\nquiz,1\nor not,0\n"), tokenizer=made)


@pytest.mark.parametrize("name", ["sklearn_breast_cancer", "uci_heart_processed.cleveland"])
def test_real_tables_are_read_whole(real_file, name):
    path = real_file(f"tabular/{name}.csv")
    skip = 1 if name.startswith("sklearn") else 0
    frame = pd.read_csv(path, header=None, skiprows=skip, na_values="?")
    corpus = load_corpus(path)
    assert (len(corpus), int(corpus.lengths.unique())) == (len(frame), frame.shape[1] - 1)
    assert corpus.classes == tuple(map(str, sorted(frame.iloc[:, -1].unique())))
    firsts = torch.tensor(corpus.tokenizer._firsts)
    unknown = torch.stack([example["tokens"] for example in corpus]) == firsts
    assert unknown.numpy().tolist() == frame.iloc[:, :-1].isna().to_numpy().tolist()
