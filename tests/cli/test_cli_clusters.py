"""`graphattn clusters`: images and tables, whole and broken, and what it prints about them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import graphattn as ga
from graphattn.cli.clusters import run_clusters
from graphattn.cli.clusters.patterns import parse_pattern
from graphattn.cli.clusters.sample import load_tokens
from graphattn.dynamics import dice, label_accuracy, standardize

matplotlib = pytest.importorskip("matplotlib", reason="figures need the extra `plots`")
cluster = pytest.importorskip("sklearn.cluster", reason="KMeans needs scikit-learn")
from matplotlib.image import imsave  # noqa: E402

SHARED = Path(__file__).parents[3] / "shared" / "data"


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"real data not there: {name}")
    return path


def run(file, out, *, pattern="global", scaling="sdp", steps=4, mask=None, labels=None) -> str:
    text = io.StringIO()
    console = Console(file=text, width=80, emoji=False)
    run_clusters(Path(file), pattern, scaling, steps, mask, labels, out, console)
    return text.getvalue()


@pytest.fixture
def square(tmp_path) -> tuple[Path, Path]:
    """A noisy bright square on a dark ground, 12 x 16, and its trimap."""
    mask = np.zeros((12, 16), dtype=np.uint8)
    mask[2:9, 3:10] = 255
    mask[3:8, 4:9] = 1
    generator = np.random.default_rng(0)
    image = np.clip(0.2 + 0.6 * (mask == 1) + 0.02 * generator.random((12, 16)), 0, 1)
    imsave(tmp_path / "square.png", np.stack([image] * 3, axis=2))
    from PIL import Image

    Image.fromarray(mask).save(tmp_path / "trimap.png")
    return tmp_path / "square.png", tmp_path / "trimap.png"


def table_file(tmp_path, text) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(text)
    return path


TABLE = "height,name,weight,kind\n" + "".join(
    f"{10 * (i % 2) + i / 100},n{i},{5 * (i % 2)},{'ab'[i % 2]}\n" for i in range(30)
)


def test_an_image_with_its_trimap_shows_every_score_and_the_baseline(square, tmp_path, capfd):
    image, trimap = square
    out = tmp_path / "out"
    output = run(image, out, mask=trimap)
    for word in ("merged", "baseline, no attention", "silhouette", "Dice", "boundary", "leading"):
        assert word in output
    assert {p.name for p in out.iterdir()} == {
        "clusters.png", "spectra.png", "counts.png", "report.html"}  # fmt: skip
    assert capfd.readouterr().out.strip() == str(out / "report.html")
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output


def test_the_baseline_row_is_kmeans_on_the_input(square, tmp_path):
    image, trimap = square
    tokens = load_tokens(image, trimap, None)
    labels = torch.from_numpy(cluster.KMeans(2, n_init=10, random_state=0).fit_predict(tokens.x))
    output = run(image, tmp_path, mask=trimap)
    rows = output.split("baseline, no attention")
    numbers = re.findall(r"\d\.\d{3}", rows[-1].split("\n\n")[0])
    # one row may be broken over lines: silhouette, Dice, Dice without the boundary
    assert float(numbers[1]) == pytest.approx(dice(labels, tokens.mask), abs=6e-4)
    assert float(numbers[2]) == pytest.approx(dice(labels, tokens.mask, ignore=255), abs=6e-4)


def test_a_table_with_labels_shows_their_accuracy(tmp_path, capfd):
    output = run(table_file(tmp_path, TABLE), tmp_path / "out", labels="kind")
    assert "30 rows, 2 features" in output
    assert "Not numbers, left out: name." in output
    assert "accuracy" in output
    assert "1.000" in output  # the two kinds are far apart


def test_labels_are_optional_and_may_be_numbered(tmp_path):
    path = table_file(tmp_path, TABLE)
    assert "accuracy" not in run(path, tmp_path / "a")
    for label in ("4", "-1", "kind"):
        assert load_tokens(path, None, label).truth.tolist() == [i % 2 for i in range(30)]


def test_pixels_are_standardised_rows_of_the_image(square):
    image, trimap = square
    tokens = load_tokens(image, trimap, None)
    pixels = matplotlib.image.imread(image)[..., :3].reshape(-1, 3).astype(np.float64)
    expected = standardize(torch.from_numpy(pixels))
    torch.testing.assert_close(tokens.x, expected)
    assert tokens.has_boundary
    assert tokens.mask.unique().tolist() == [0, 1, 255]


def test_large_images_are_averaged_over_blocks_and_say_so(tmp_path):
    pixels = np.random.default_rng(0).random((130, 200))
    path = tmp_path / "large.png"
    imsave(path, pixels, cmap="gray")
    mask = tmp_path / "mask.png"
    imsave(mask, (np.arange(130) > 70)[:, None] * np.ones((1, 200)), cmap="gray")
    tokens = load_tokens(path, mask, None)
    assert tokens.image.shape == (32, 50, 3)
    assert len(tokens.x) == 32 * 50
    read = matplotlib.image.imread(path)[:128, :200, :3].astype(np.float64)
    np.testing.assert_allclose(tokens.image[3, 7], read[12:16, 28:32].mean(axis=(0, 1)))
    assert any("averaged over blocks of 4 x 4" in note for note in tokens.notes)
    assert tokens.mask.view(32, 50)[:, 0].tolist() == [int(4 * i + 2 > 70) for i in range(32)]
    assert not tokens.has_boundary


@pytest.mark.parametrize(
    ("text", "graph", "says"),
    [
        ("global", ga.complete_graph(600), "every token"),
        ("block:128", ga.block_window_graph(600, 128), "blocks of 128"),
        ("window:128", ga.window_path_graph(600, 64, self_loops=True), "64 tokens on each side"),
        ("longformer:512", ga.longformer_graph(600, 256, [300]), "256 tokens on each side"),
    ],
)
def test_patterns_are_these_graphs_and_say_what_they_mean(text, graph, says):
    pattern = parse_pattern(text, 600, is_image=True)
    assert pattern.graph == graph
    assert says in pattern.meaning


def test_the_global_token_is_the_middle_of_an_image_and_the_first_of_a_table(tmp_path):
    """Attention Clusters, Section 3.3."""
    image, table = (parse_pattern("longformer:4", 9, is_image=i) for i in (True, False))
    assert image.graph == ga.longformer_graph(9, 2, [4])
    assert table.graph == ga.longformer_graph(9, 2, [0])
    output = run(table_file(tmp_path, TABLE), tmp_path, pattern="longformer:8")
    assert "4 tokens on each side (a window of 8), and token 0 sees" in " ".join(output.split())


@pytest.mark.parametrize(
    ("scaling", "pattern"),
    [("sdp", "block:8"), ("sq", "window:8"), ("sq_inplace", "longformer:1000000")],
)
def test_every_scaling_and_pattern_runs(tmp_path, scaling, pattern):
    path = table_file(tmp_path, TABLE)
    output = run(path, tmp_path, pattern=pattern, scaling=scaling, steps=2)
    assert f"Scaling {scaling}" in output
    assert f"Pattern {pattern}" in output


def test_names_from_the_file_are_escaped_in_terminal_and_report(tmp_path, capfd):
    text = "<script>alert(1)</script>,[bold]b[/bold],y\n" + "1.5,2,p\n2,3,q\n3,5,p\n4,1,q\n"
    path = tmp_path / "<img src=x>[red].csv"
    path.write_text(text)
    output = run(path, tmp_path / "out", labels="y")
    assert "<img src=x>[red].csv" in output
    html = (tmp_path / "out" / "report.html").read_text()
    assert "<script>alert" not in html
    assert "<img src=x>" not in html
    assert "&lt;img src=x&gt;[red].csv" in html
    assert not re.search(r"(?:src|href)=\"(?!data:)", html)  # it needs no other file


def test_missing_values_leave_rows_out_and_say_so(tmp_path):
    rows = "a,b,y\n1,2,0\n?,3,1\n4,,0\n2,2,1\n7,1,1\n5,5,\n3,4,0\n"
    tokens = load_tokens(table_file(tmp_path, rows), None, "y")
    assert len(tokens.x) == 4
    assert tokens.truth.tolist() == [0, 1, 1, 0]
    assert any("3 rows with missing values" in note for note in tokens.notes)


def test_files_without_header_have_numbered_columns(tmp_path):
    tokens = load_tokens(table_file(tmp_path, "1,2,0\n3,4,1\n5,7,0\n"), None, "3")
    assert tokens.features == ["column 1", "column 2"]
    assert tokens.truth.tolist() == [0, 1, 0]


def test_real_tables_are_read():
    cancer = load_tokens(shared("tabular/sklearn_breast_cancer.csv"), None, "-1")
    assert tuple(cancer.x.shape) == (569, 30)
    assert cancer.truth.bincount().tolist() == [212, 357]
    heart = load_tokens(shared("tabular/uci_heart_processed.cleveland.csv"), None, "14")
    assert tuple(heart.x.shape) == (297, 13)  # of 303, 6 have missing values
    assert heart.truth.bincount()[0] == 160


def test_kmeans_on_the_cat_is_the_known_baseline():
    tokens = load_tokens(
        shared("images/derived_Abyssinian_11_64.png"),
        shared("images/derived_Abyssinian_11_64_trimap.png"),
        None,
    )
    labels = torch.from_numpy(cluster.KMeans(2, n_init=10, random_state=0).fit_predict(tokens.x))
    assert dice(labels, tokens.mask, ignore=255) == pytest.approx(0.965, abs=2e-3)
    assert dice(labels, tokens.mask) == pytest.approx(0.846, abs=2e-3)
    assert label_accuracy(labels, (tokens.mask != 0).long()) > 0.8


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (TABLE, {"pattern": "block"}, "--pattern must be global, block:SIZE"),
        (TABLE, {"pattern": "block:0"}, "--pattern must be"),
        (TABLE, {"pattern": "window:1"}, "--pattern must be"),
        (TABLE, {"pattern": "global:3"}, "--pattern must be"),
        (TABLE, {"pattern": "longformer:-5"}, "--pattern must be"),
        (TABLE, {"scaling": "sqrt"}, "--scaling must be one of 'sdp', 'sq', 'sq_inplace'"),
        (TABLE, {"steps": 0}, "--steps must be >= 1"),
        (TABLE, {"labels": "colour"}, "--labels must be a column .*height, name, weight, kind"),
        (TABLE, {"labels": "5"}, "--labels must be a column"),
        (TABLE, {"labels": "0"}, "--labels must be a column"),
        ("a,b\n" + "".join(f"{i},{i}\n" for i in range(60)), {"labels": "b"}, "2 to 50 classes"),
        (TABLE, {"mask": Path("mask.png")}, "--mask goes with an image"),
        ("x,y\np,q\nr,s\nt,u\n", {}, "has no column of numbers"),
        ("1,2\n3\n4,5\n", {}, "row 3 has 2 columns, the ones before it 1"),
        ("1,2\n", {}, "at least two rows"),
        ("a,b\n1,2\n3,4\n", {}, "at least 3 whole rows, got 2"),
        ("1,nan\n2,inf\n3,4\n", {"labels": "1"}, "has no column of numbers"),
        ("\0\1binary", {}, "is binary"),
    ],
)
def test_bad_input_is_one_line_that_names_it(tmp_path, content, options, says):
    path = table_file(tmp_path, content)
    with pytest.raises(ValueError, match=says) as caught:
        run(path, tmp_path / "out", **options)
    assert "\n" not in str(caught.value)


def test_bad_images_are_named(tmp_path, square):
    image, trimap = square
    broken = tmp_path / "broken.png"
    broken.write_bytes(image.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"broken\.png: cannot be read as PNG"):
        load_tokens(broken, None, None)
    with pytest.raises(ValueError, match="--labels names a column of a table"):
        load_tokens(image, None, "kind")
    small = tmp_path / "small.png"
    imsave(small, np.zeros((3, 3)))
    with pytest.raises(ValueError, match="must have the size of the image, 16 x 12, got 3 x 3"):
        load_tokens(image, small, None)
    black = tmp_path / "black.png"
    imsave(black, np.zeros((12, 16, 3)))
    with pytest.raises(ValueError, match="has no foreground"):
        load_tokens(image, black, None)
    with pytest.raises(ValueError, match="no such file"):
        load_tokens(tmp_path / "none.png", None, None)
    assert trimap.exists()
