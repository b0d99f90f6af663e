"""Images: idx files and folders of pictures, pixel by pixel."""

import gzip
import struct

import numpy as np
import pytest
import torch

from graphattn.data import FileFormatError, load_corpus, read_idx

pytest.importorskip("datasets", reason="corpora are kept with datasets")
Image = pytest.importorskip("PIL.Image", reason="pictures are read with pillow")


def idx(array: np.ndarray, code: int = 8) -> bytes:
    """An idx file, by its definition."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize(
    ("dtype", "code"),
    [("u1", 8), ("i1", 9), ("i2", 11), ("i4", 12), ("f4", 13), ("f8", 14)],
)
def test_every_type_of_idx_comes_back(tmp_path, dtype, code):
    array = np.arange(-12, 12).reshape(2, 3, 4).astype(dtype)
    path = tmp_path / "some.gz"
    path.write_bytes(gzip.compress(idx(array, code)))
    results = read_idx(path)
    assert results.numpy().dtype == np.dtype(dtype)
    assert results.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\x89PNG", "is no idx file"),
        (b"\0\0\x08\x02\0\0", "is cut off: an idx header of 12 bytes"),
        (idx(pixels(2, 3, 4))[:-1], r"is cut off: \[2, 3, 4\] are 24 bytes, got 23"),
        (idx(pixels(2, 3, 4)) + b"\0", "holds more than its header says"),
    ],
)
def test_a_damaged_idx_file_says_so(tmp_path, content, reason):
    path = tmp_path / "x-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=reason):
        read_idx(path)
    with pytest.raises(FileFormatError, match=str(path)):
        load_corpus(path, kind="images")


def test_images_of_idx_are_their_bytes_over_255_with_labels_beside(tmp_path):
    images, labels = pixels(5, 4, 6), np.array([3, 0, 1, 3, 2], dtype=np.uint8)
    (tmp_path / "x-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    alone = load_corpus(tmp_path)
    assert "label" not in alone[0]
    assert alone.classes == ()
    (tmp_path / "x-labels-idx1-ubyte").write_bytes(idx(labels))
    for path in (tmp_path, tmp_path / "x-images-idx3-ubyte.gz"):
        corpus = load_corpus(path)
        assert corpus.kind == "images"
        assert corpus.image_shape == (1, 4, 6)
        assert corpus.classes == ("0", "1", "2", "3")
        assert corpus.lengths.tolist() == [1] * 5
        assert [example["label"] for example in corpus] == labels.tolist()
        for example, image in zip(corpus, images, strict=True):
            assert example["image"].dtype == torch.float32
            torch.testing.assert_close(example["image"], torch.tensor(image / 255)[None].float())


def test_colours_of_idx_images_come_before_height_and_width(tmp_path):
    images = pixels(3, 4, 6, 2)
    (tmp_path / "x-images-idx4-ubyte").write_bytes(idx(images))
    corpus = load_corpus(tmp_path)
    assert corpus.image_shape == (2, 4, 6)
    for example, image in zip(corpus, images, strict=True):
        assert torch.equal((example["image"] * 255).round(), torch.tensor(image).permute(2, 0, 1))


def test_labels_must_be_as_many_as_images(tmp_path):
    (tmp_path / "x-images-idx3-ubyte").write_bytes(idx(pixels(5, 4, 6)))
    for number in (4, 6):
        labels = np.zeros(number, dtype=np.uint8)
        (tmp_path / "x-labels-idx1-ubyte").write_bytes(idx(labels))
        with pytest.raises(FileFormatError, match=f"labels-idx1-ubyte: holds {number} labels"):
            load_corpus(tmp_path)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_a_picture_keeps_its_channels(tmp_path, mode):
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = pixels(4, 6, channels)
    Image.fromarray(values.squeeze(-1) if channels == 1 else values, mode).save(tmp_path / "a.png")
    corpus = load_corpus(tmp_path / "a.png")
    assert corpus.image_shape == (channels, 4, 6)
    assert torch.equal((corpus[0]["image"] * 255).round(), torch.tensor(values).permute(2, 0, 1))
    assert corpus[0]["name"] == "a.png"


def test_folders_of_pictures_are_classes(tmp_path):
    for name in ("dog/b.png", "cat/a.png", "cat/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(pixels(4, 4, 3)).save(tmp_path / name)
    corpus = load_corpus(tmp_path)
    assert corpus.classes == ("cat", "dog")
    assert corpus.names == ["cat/a.png", "cat/b.png", "dog/b.png"]
    assert [example["label"] for example in corpus] == [0, 0, 1]
    Image.fromarray(pixels(4, 4, 3)).save(tmp_path / "stray.png")
    with pytest.raises(FileFormatError, match=r"stray.png: has no class"):
        load_corpus(tmp_path)


def test_palettes_become_colours(tmp_path):
    colours = Image.new("P", (2, 1))
    colours.putpalette([255, 0, 0, 0, 0, 255])
    colours.putdata([0, 1])
    colours.save(tmp_path / "a.png")
    image = load_corpus(tmp_path / "a.png")[0]["image"]
    assert image[:, 0].T.tolist() == [[1, 0, 0], [0, 0, 1]]


def test_a_picture_of_another_size_is_named(tmp_path):
    Image.fromarray(pixels(4, 4)).save(tmp_path / "a.png")
    Image.fromarray(pixels(4, 5)).save(tmp_path / "b.png")
    with pytest.raises(FileFormatError, match=r"b.png: is an image .* \(1, 4, 5\), but .*a.png"):
        load_corpus(tmp_path)


def test_what_is_no_picture_is_named(tmp_path):
    whole = tmp_path / "whole.png"
    Image.fromarray(pixels(40, 40)).save(whole)
    broken = tmp_path / "broken.png"
    broken.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(FileFormatError, match=r"broken.png: is a damaged image"):
        load_corpus(broken)
    broken.write_text("hello")
    with pytest.raises(FileFormatError, match=r"broken.png: is not an image"):
        load_corpus(broken)
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(broken)
    with pytest.raises(FileFormatError, match=r"broken.png: has pixels of mode I;16"):
        load_corpus(broken)


def test_mnist_is_read_image_by_image(real_file):
    folder = real_file("images/mnist_t10k")
    corpus = load_corpus(folder)
    data = gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / "t10k-labels-idx1-ubyte.gz").read_bytes())[8:]
    images = np.frombuffer(data, np.uint8, offset=16).reshape(-1, 28, 28)
    assert (len(corpus), corpus.image_shape) == (10_000, (1, 28, 28))
    for i in range(0, 10_000, 97):
        torch.testing.assert_close(corpus[i]["image"][0], torch.tensor(images[i] / 255).float())
        assert corpus[i]["label"] == labels[i]
