"""`graphattn clusters`: images and tables, whole and broken, and what it prints about them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import done, refused, shared
from rich.console import Console

import graphattn as ga
from graphattn.cli.clusters import parse_pattern, run_clusters
from graphattn.cli.clusters.sample import load_tokens
from graphattn.dynamics import dice, label_accuracy, standardize

matplotlib = pytest.importorskip("matplotlib", reason="figures need the extra `plots`")
cluster = pytest.importorskip("sklearn.cluster", reason="KMeans needs scikit-learn")
from matplotlib.image import imsave  # noqa: E402
from PIL import Image  # noqa: E402
from PIL import features as pillow_features  # noqa: E402


def run(
    file, out, *, pattern="global", scaling="sdp", steps=4, mask=None, labels=None, **options
) -> str:
    text = io.StringIO()
    console = Console(file=text, width=80, emoji=False)
    options |= {"mask": mask, "labels": labels, "pattern": pattern, "scaling": scaling}
    run_clusters(Path(file), steps=steps, out=out, console=console, **options)
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
    Image.fromarray(mask).save(tmp_path / "trimap.png")
    return tmp_path / "square.png", tmp_path / "trimap.png"


def table_file(tmp_path, text) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(text)
    return path


TABLE = "height,name,weight,kind\n" + "".join(
    f"{10 * (i % 2) + i / 100},n{i},{5 * (i % 2)},{'ab'[i % 2]}\n" for i in range(30)
)


def test_an_image_with_its_trimap_shows_every_score_and_the_baseline(
    square, tmp_path, capfd, on_a_phone
):
    image, trimap = square
    out = tmp_path / "out"
    output = run(image, out, mask=trimap)
    for word in ("merged", "baseline, no attention", "silhouette", "Dice", "boundary", "leading"):
        assert word in output
    assert [file.name for file in out.iterdir()] == ["report.html"]
    assert len(on_a_phone) == 5 + 2  # images; shares of the variance and the number of clusters
    assert on_a_phone.smallest_label() >= 9
    assert capfd.readouterr().out.strip() == str(out / "report.html")
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output


@pytest.mark.long
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


@pytest.mark.long
def test_a_table_with_labels_shows_their_accuracy(tmp_path, capfd, on_a_phone):
    output = run(table_file(tmp_path, TABLE), tmp_path / "out", labels="kind")
    assert "30 rows, 2 features" in output
    assert "Columns without numbers are omitted: name." in output
    assert "accuracy" in output
    assert "1.000" in output  # the two kinds are far apart
    assert len(on_a_phone) == 2 + 2  # two clouds of points; variance and number of clusters
    assert on_a_phone.smallest_label() >= 9


@pytest.mark.long
def test_labels_are_optional_and_may_be_numbered(tmp_path):
    path = table_file(tmp_path, TABLE)
    assert "accuracy" not in run(path, tmp_path / "a")
    for label in ("4", "-1", "kind"):
        assert load_tokens(path, labels=label).truth.tolist() == [i % 2 for i in range(30)]


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


@pytest.mark.long
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
    name = "images/derived_Abyssinian_11_64"
    tokens = load_tokens(shared(f"{name}.png"), shared(f"{name}_trimap.png"), None)
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
        (TABLE, {"labels": "colour"}, "--labels must be the name .*height, name, weight, kind"),
        (TABLE, {"labels": "5"}, "--labels must be the name of a column"),
        (TABLE, {"labels": "0"}, "--labels must be the name of a column"),
        ("a,b\n" + "".join(f"{i},{i}\n" for i in range(60)), {"labels": "b"}, "2 to 50 classes"),
        (TABLE, {"mask": Path("mask.png")}, "--mask can only be used with an image"),
        ("x,y\np,q\nr,s\nt,u\n", {}, "has no column of numbers"),
        ("1,2\n3\n4,5\n", {}, "row 3 has 2 columns, but the rows before it have 1"),
        ("1,2\n", {}, "at least two rows"),
        ("a,b\n1,2\n3,4\n", {}, "at least 3 rows without missing values, got 2"),
        ("1,nan\n2,inf\n3,4\n", {"labels": "1"}, "has no column of numbers"),
        ("\0\1binary", {}, "is binary"),
        (TABLE, {"columns": "height,colour"}, "--columns must be the name of a .*got 'colour'"),
        (TABLE, {"columns": "name"}, "--columns must be columns of numbers, got 'name'"),
        (TABLE, {"columns": "1,height"}, "--columns must name each .*, got 'height' twice"),
        (TABLE, {"columns": ""}, "--columns must name at least one column"),
        (TABLE, {"columns": "3", "labels": "3"}, "must not contain the column of --labels"),
        (TABLE, {"per_class": 4}, "--per-class needs --labels"),
        (TABLE, {"per_class": 0, "labels": "kind"}, "--per-class must be >= 1"),
        (TABLE, {"per_class": 16, "labels": "kind"}, "--per-class must be at most 15, .*'a'"),
        (TABLE, {"seed": -1}, "--seed must be >= 0"),
        (TABLE, {"size": 32}, "--size can only be used with an image"),
        (TABLE, {"global_tokens": "first"}, "can only be used with --pattern longformer"),
        (TABLE, {"pattern": "longformer:4", "global_tokens": "30"}, "from -30 to 29, or first"),
        (TABLE, {"pattern": "longformer:4", "global_tokens": "0,"}, "--global-tokens must be"),
    ],
)
def test_bad_input_is_one_line_that_names_it(tmp_path, content, options, says):
    path = table_file(tmp_path, content)
    with pytest.raises(ValueError, match=says) as caught:
        run(path, tmp_path / "out", **options)
    assert "\n" not in str(caught.value)


def test_bad_images_are_named(tmp_path, square):
    image, _ = square
    (tmp_path / "broken.png").write_bytes(image.read_bytes()[:60])
    imsave(tmp_path / "small.png", np.zeros((3, 3)))
    imsave(tmp_path / "black.png", np.zeros((12, 16, 3)))
    for file, mask, labels, reason in (
        ("broken.png", None, None, r"broken\.png: cannot be read as PNG"),
        (image, None, "kind", "--labels can only be used with a table"),
        (image, "small.png", None, "must have the size of the image, 16 x 12, got 3 x 3"),
        (image, "black.png", None, "has no foreground"),
        ("none.png", None, None, "no such file"),
    ):
        with pytest.raises(ValueError, match=reason):
            load_tokens(tmp_path / file, None if mask is None else tmp_path / mask, labels)


def palette_png(path: Path, indices: np.ndarray, palette: list[int]) -> Path:
    image = Image.fromarray(indices.astype(np.uint8), mode="L")
    image.putpalette(palette)
    assert image.mode == "P"
    image.save(path)
    return path


RAINBOW = [(37 * n + 90 * channel) % 256 for n in range(256) for channel in range(3)]


@pytest.mark.parametrize("palette", [RAINBOW, [n for n in range(256) for _ in range(3)]])
@pytest.mark.parametrize(
    ("values", "classes"),
    [
        ((1, 2, 3), {1: 1, 2: 0, 3: 255}),  # Oxford-IIIT Pet: foreground, background, boundary
        ((0, 1, 255), {0: 0, 1: 1, 255: 255}),
    ],
)
def test_a_trimap_with_a_palette_keeps_its_indices(square, tmp_path, palette, values, classes):
    image, _ = square
    indices = np.random.default_rng(1).choice(values, (12, 16))
    tokens = load_tokens(image, palette_png(tmp_path / "p.png", indices, palette), None)
    assert tokens.mask.tolist() == [classes[n] for n in indices.reshape(-1).tolist()]
    assert tokens.has_boundary
    assert not any("alpha" in note for note in tokens.notes)
    assert any("Oxford-IIIT Pet" in note for note in tokens.notes) == (values == (1, 2, 3))


def test_the_same_numbers_without_a_palette_are_the_same_trimap(square, tmp_path):
    image, _ = square
    indices = np.random.default_rng(2).choice([1, 2, 3], (12, 16)).astype(np.uint8)
    Image.fromarray(indices).save(tmp_path / "gray.png")
    colours = palette_png(tmp_path / "colours.png", indices, RAINBOW)
    gray, indexed = (load_tokens(image, p, None) for p in (tmp_path / "gray.png", colours))
    assert torch.equal(gray.mask, indexed.mask)


def test_indices_of_classes_are_foreground_and_say_so(square, tmp_path):
    """Pascal VOC: 0 background, classes, 255 void."""
    image, _ = square
    indices = np.random.default_rng(3).choice([0, 12, 15, 255], (12, 16))
    tokens = load_tokens(image, palette_png(tmp_path / "voc.png", indices, RAINBOW), None)
    expected = np.where(indices == 255, 255, indices > 0).reshape(-1)
    assert tokens.mask.tolist() == expected.tolist()
    assert any("0 background, 12, 15 foreground, 255 boundary" in note for note in tokens.notes)


def test_a_palette_of_black_and_white_is_a_picture_of_a_mask(square, tmp_path):
    image, _ = square
    indices = np.random.default_rng(4).choice([0, 1], (12, 16))
    white_first = palette_png(tmp_path / "m.png", indices, [255, 255, 255, 0, 0, 0])
    assert load_tokens(image, white_first, None).mask.tolist() == (1 - indices).reshape(-1).tolist()


def test_an_image_with_a_palette_is_read_in_its_colours_and_has_no_alpha(tmp_path):
    indices = np.random.default_rng(5).integers(0, 256, (9, 11))
    tokens = load_tokens(palette_png(tmp_path / "p.png", indices, RAINBOW))
    colours = np.array(RAINBOW).reshape(256, 3)[indices] / 255
    np.testing.assert_allclose(tokens.image, colours, atol=1e-12)
    assert tokens.notes == []


def test_alpha_is_left_out_and_says_so_only_where_there_is_some(tmp_path):
    pixels = np.random.default_rng(6).random((6, 5, 4))
    imsave(tmp_path / "rgba.png", pixels)
    imsave(tmp_path / "rgb.png", matplotlib.image.imread(tmp_path / "rgba.png")[..., :3])
    Image.open(tmp_path / "rgba.png").convert("RGB").save(tmp_path / "plain.png")
    with_alpha, plain = (load_tokens(tmp_path / f"{n}.png") for n in ("rgba", "plain"))
    assert with_alpha.notes == ["The alpha channel is left out."]
    pixels[..., 3] = 1
    imsave(tmp_path / "opaque.png", pixels)
    assert load_tokens(tmp_path / "opaque.png").notes == []
    assert plain.notes == []
    np.testing.assert_allclose(with_alpha.image, plain.image)


@pytest.mark.parametrize("form", ["JPEG", "BMP", "GIF", "TIFF", "WEBP"])
def test_other_formats_are_read_as_pillow_decodes_them(tmp_path, form, capfd):
    if form == "WEBP" and not pillow_features.check("webp"):
        pytest.skip("this Pillow has no WebP")
    smooth = np.add.outer(np.arange(20.0), np.arange(30.0))[..., None] * [4, 3, 2]
    path = tmp_path / f"picture.{form.lower()}"
    Image.fromarray(smooth.astype(np.uint8)).save(path, format=form)
    tokens = load_tokens(path)
    expected = np.asarray(Image.open(path).convert("RGB")) / 255
    np.testing.assert_allclose(tokens.image, expected)
    assert "600 tokens" in tokens.title
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(path.read_bytes()[:30])
    with pytest.raises(ValueError, match=f"broken.jpg: cannot be read as {form}"):
        load_tokens(broken)


def test_a_photo_stands_upright(tmp_path):
    """Cameras store a turned picture, and in its metadata how to turn it."""
    upright = np.zeros((10, 16, 3), dtype=np.uint8)
    upright[:5] = 200
    stored = Image.fromarray(np.rot90(upright, 1).copy())
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees, clockwise
    stored.save(tmp_path / "photo.jpg", exif=exif, quality=95)
    image = load_tokens(tmp_path / "photo.jpg").image
    assert image.shape == (10, 16, 3)
    assert image[:4].min() > 0.7
    assert image[6:].max() < 0.1


def test_sixteen_bits_are_read_in_full(tmp_path):
    values = (np.arange(35).reshape(5, 7) * 1800).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    tokens = load_tokens(tmp_path / "deep.png")
    np.testing.assert_allclose(tokens.image[..., 0], values / 65535)


@pytest.mark.long
def test_an_image_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    bomb = tmp_path / "bomb.png"
    Image.new("1", (40_000, 30_000)).save(bomb)
    assert bomb.stat().st_size < 300_000
    good = tmp_path / "good.png"
    Image.new("RGB", (200, 100)).save(good)
    # Only what is refused may be looked at without being unpacked.
    load = Image.Image.load
    loaded = []
    monkeypatch.setattr(Image.Image, "load", lambda self: (loaded.append(self.size), load(self))[1])
    for call in (lambda: load_tokens(bomb), lambda: load_tokens(good, bomb, None)):
        reason = r"bomb\.png: has 40,000 x 30,000 = 1,200,000,000 pixels, more than --max-pixels 5"
        with pytest.raises(ValueError, match=reason):
            call()
    assert (40_000, 30_000) not in loaded


def test_the_limit_of_pixels_is_the_option_s(tmp_path):
    path = tmp_path / "image.png"
    Image.new("RGB", (200, 100)).save(path)
    with pytest.raises(ValueError, match="200 x 100 = 20,000 pixels, more than --max-pixels 19999"):
        load_tokens(path, None, None, max_pixels=19_999)
    assert load_tokens(path, None, None, max_pixels=20_000).image.shape == (25, 50, 3)


def test_the_size_of_an_image_can_be_chosen(tmp_path):
    pixels = np.random.default_rng(7).random((120, 90, 3))
    imsave(tmp_path / "image.png", pixels)
    for size, shape in ((None, (60, 45)), (120, (120, 90)), (40, (40, 30)), (7, (6, 5))):
        tokens = load_tokens(tmp_path / "image.png", None, None, size=size)
        assert tokens.image.shape[:2] == shape
        assert len(tokens.x) == shape[0] * shape[1]
    imsave(tmp_path / "large.png", np.zeros((150, 150, 3)))
    with pytest.raises(ValueError, match=r"--size must give at most 20,000 tokens, got 150, whic"):
        load_tokens(tmp_path / "large.png", None, None, size=150)
    with pytest.raises(ValueError, match="--columns can only be used with a table"):
        load_tokens(tmp_path / "image.png", None, None, columns="1")


def test_features_are_the_columns_asked_for_in_that_order(tmp_path):
    text = 'a,"b, c",d,kind\n' + "".join(f"{i},{i * i},{-i},{i % 2}\n" for i in range(12))
    path = table_file(tmp_path, text)
    i = torch.arange(12.0, dtype=torch.float64)
    for columns, names, values in (
        ("d,a", ["d", "a"], [-i, i]),
        ('"b, c", 1', ["b, c", "a"], [i * i, i]),
        ("b, c", ["b, c"], [i * i]),
        ("-2", ["d"], [-i]),
    ):
        tokens = load_tokens(path, None, "kind", columns=columns)
        assert tokens.features == names
        torch.testing.assert_close(tokens.x, standardize(torch.stack(values, dim=1)))
    # A column that is not asked for may hold what it likes.
    rows = "a,b,y\n1,2,0\n?,3,1\n4,x,0\n2,2,1\n"
    assert len(load_tokens(table_file(tmp_path, rows), None, "y", columns="a").x) == 3


def test_balanced_classes_are_drawn_at_random_and_kept_in_order(tmp_path):
    """Attention Clusters, Section 2.2: 512 random rows of each of two classes."""
    kinds = np.random.default_rng(8).choice(["x", "y", "z"], 300, p=[0.6, 0.3, 0.1])
    text = "n,kind\n" + "".join(f"{n},{kind}\n" for n, kind in enumerate(kinds))
    path = table_file(tmp_path, text)
    draws = {}
    for seed in (0, 1):
        tokens = load_tokens(path, None, "kind", per_class=20, seed=seed)
        assert tokens.truth.bincount().tolist() == [20, 20, 20]
        values = tokens.x[:, 0]
        assert (values.diff() > 0).all()  # n ascends in the file
        draws[seed] = values
        again = load_tokens(path, None, "kind", per_class=20, seed=seed)
        assert torch.equal(again.x, tokens.x)
        assert any(f"20 rows of each of 3 classes, drawn at random (seed {seed})" in note
                   for note in tokens.notes)  # fmt: skip
    assert not torch.equal(draws[0], draws[1])
    fewest = int(np.unique(kinds, return_counts=True)[1].min())
    assert len(load_tokens(path, None, "kind", per_class=fewest).x) == 3 * fewest


@pytest.mark.long
def test_global_tokens_can_be_chosen_such_as_the_first_and_the_last(tmp_path):
    """Attention Clusters, Figure 8: Data C has both as global tokens."""
    for text, tokens in (("first,last", [0, 29]), ("0, -1", [0, 29]), ("middle", [15]), ("7", [7])):
        pattern = parse_pattern("longformer:4", 30, is_image=False, global_tokens=text)
        assert pattern.graph == ga.longformer_graph(30, 2, tokens)
    path = table_file(tmp_path, TABLE)
    output = run(path, tmp_path, pattern="longformer:4", global_tokens="first,last")
    assert "and tokens 0, 29 see and are seen by all" in " ".join(output.split())


@pytest.mark.long
def test_one_step_is_no_steps(tmp_path):
    output = run(table_file(tmp_path, TABLE), tmp_path / "a", steps=1, columns="height")
    assert "Clusters after 1 step\n" in re.sub(" +\n", "\n", output)
    assert "30 rows, 1 feature\n" in output
    assert "1 token on each side" in run(table_file(tmp_path, TABLE), tmp_path, pattern="window:2")
    assert "1 steps" not in (tmp_path / "a" / "report.html").read_text()
    x = torch.randn(20, 2, dtype=torch.float64)
    assert "after 1 step " in str(ga.dynamics.preview(x, ga.window_path_graph(20, 2), steps=1))


def test_the_command_takes_all_options(tmp_path):
    path = table_file(tmp_path, TABLE)
    arguments = ["clusters", path, "--columns", "weight,height", "--labels", "-1", "--per-class", 9]
    arguments += ["--seed", 3, "--pattern", "longformer:4", "--global-tokens", "-1", "--steps", 1]
    arguments += ["--out", tmp_path / "out"]
    text = " ".join(done(*arguments).output.split())
    assert "18 rows, 2 features" in text
    assert "token 17 sees and is seen by all" in text
    Image.new("RGB", (90, 90)).save(tmp_path / "photo.jpg")
    reason = refused("clusters", tmp_path / "photo.jpg", "--max-pixels", 8099)
    assert "8,100 pixels, more than --max-pixels 8099" in reason
