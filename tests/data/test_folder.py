"""Image files of every mode: 16 bits keep their values, and what cannot be read right is refused by name."""

from __future__ import annotations

import shutil
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from leanbayes import data
from leanbayes.data.files.folder import find_images, ImageFiles

RAMP = np.linspace(0, 60000, 64).reshape(8, 8).astype("u2")
GREY = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
COLOUR = np.stack([GREY, GREY[::-1], GREY.T], 2)


def make(path, *images, ending="png", **options):
    """Put the same images into both splits and two classes."""
    for split in ("train", "test"):
        for name in ("a", "b"):
            (path / split / name).mkdir(parents=True)
            for k, image in enumerate(images):
                image.save(path / split / name / f"{k}.{ending}", **options)
    return path


def png(width, height, bits, kind, pixels):
    """Write a PNG file by hand: Pillow writes neither 16-bit colour nor sizes without pixels."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_16_bit_images_keep_all_their_values(tmp_path, ending):
    with pytest.warns(UserWarning, match=r"4 of 4 images have 16 bits a pixel: .*divided by 65535$") as told:
        mine = data.load(make(tmp_path / "deep", Image.fromarray(RAMP), ending=ending))
    assert [warning.filename for warning in told] == [__file__]
    assert mine.train.x.dtype == torch.float32
    torch.testing.assert_close(mine.train.x[0, 0], torch.from_numpy(RAMP / 65535).float(), rtol=1e-6, atol=0)
    assert len(mine.train.x.unique()) == 64


def test_neighbouring_16_bit_values_stay_apart(tmp_path):
    every = np.arange(65536, dtype="u2").reshape(256, 256)[:, :224][:224]
    with pytest.warns(UserWarning, match="16 bits"):
        mine = data.load(make(tmp_path / "deep", Image.fromarray(np.ascontiguousarray(every))))
    assert len(mine.train.x[0].unique()) == 224 * 224


def test_16_bit_images_among_others_are_scaled_alike(tmp_path):
    deep, grey, colour = Image.fromarray(RAMP), Image.fromarray(GREY), Image.fromarray(COLOUR)
    with pytest.warns(UserWarning, match=r"4 of 8 images have 16 bits .*65535, 8-bit values divided by 255"):
        mixed = data.load(make(tmp_path / "grey", deep, grey))
    assert mixed.input_shape == (1, 8, 8)
    torch.testing.assert_close(mixed.train.x[1, 0], torch.from_numpy(GREY).float() / 255)
    with pytest.warns(UserWarning, match="4 of 8 images have 16 bits"):
        mixed = data.load(make(tmp_path / "colour", deep, colour))
    assert mixed.input_shape == (3, 8, 8)
    for channel in range(3):
        torch.testing.assert_close(mixed.train.x[0, channel], torch.from_numpy(RAMP / 65535).float())
    torch.testing.assert_close(mixed.train.x[1].permute(1, 2, 0), torch.from_numpy(COLOUR).float() / 255)
    assert mixed.inputs(mixed.train.x).std() > 0.5


def test_16_bit_images_are_resized_without_losing_depth(tmp_path):
    wide = np.arange(16 * 16, dtype="u2").reshape(16, 16) + 30000
    with pytest.warns(UserWarning, match="images") as told:
        mine = data.load(make(tmp_path / "deep", Image.fromarray(RAMP), Image.fromarray(RAMP), Image.fromarray(wide)))
    assert ["scaled and cut" in str(warning.message) for warning in told] == [True, False]
    values = mine.train.x[2] * 65535
    assert 29999 < values.min() < values.max() < 30256
    assert len(values.unique()) == 64


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.fromarray(GREY > 100), 255 * (GREY > 100)[None]),
        (Image.merge("LA", [Image.fromarray(GREY), Image.new("L", (8, 8), 255)]), GREY[None]),
        (Image.fromarray(COLOUR).convert("RGBA"), COLOUR.transpose(2, 0, 1)),
        (Image.fromarray(GREY).convert("P"), np.stack([GREY] * 3)),
    ],
    ids=["1", "LA", "RGBA", "P"],
)
def test_modes_are_read_as_they_look(tmp_path, image, expected):
    mine = data.load(make(tmp_path / "mine", image))
    assert mine.train.x.dtype == torch.uint8
    assert np.array_equal(mine.train.x[0].numpy(), expected)


def test_cmyk_is_read_as_colour(tmp_path):
    inks = Image.merge("CMYK", [Image.new("L", (8, 8), value) for value in (255, 0, 0, 0)])
    mine = data.load(make(tmp_path / "mine", inks, ending="tif"))
    assert mine.train.x[0, :, 0, 0].tolist() == [0, 255, 255]


@pytest.mark.parametrize(
    "image",
    [
        Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(GREY)]),
        Image.merge("RGBA", [*Image.fromarray(COLOUR).split(), Image.fromarray(GREY)]),
    ],
    ids=["LA", "RGBA"],
)
def test_transparent_pixels_are_refused(tmp_path, image):
    with pytest.raises(ValueError, match=r"0\.png has transparent pixels; expected opaque ones"):
        data.load(make(tmp_path / "mine", image))


def test_a_transparent_colour_of_a_palette_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"0\.png has transparent pixels"):
        data.load(make(tmp_path / "mine", Image.fromarray(GREY).convert("P"), transparency=0))


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (Image.fromarray(RAMP.astype("f4")), "has pixels of the mode F; expected grey, colour"),
        (Image.new("LAB", (8, 8)), "has pixels of the mode LAB; expected grey, colour"),
        (Image.fromarray(RAMP.astype("i4") * 2), "has values from 0 to 120000; expected at most 16 bits"),
        (Image.fromarray(-RAMP.astype("i4")), "has values from -60000 to 0; expected at most 16 bits"),
    ],
    ids=["F", "LAB", "I", "negative"],
)
def test_what_cannot_be_read_right_is_refused_by_name(tmp_path, image, sentence):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=rf"0\.tif {sentence}"):
            data.load(make(tmp_path / "mine", image, ending="tif"))


def test_16_bit_colour_and_further_frames_are_said_to_be_cut(tmp_path):
    path = make(tmp_path / "mine", Image.fromarray(COLOUR))
    rows = b"".join(b"\0" + bytes(range(48)) for _ in range(8))
    (path / "train" / "a" / "0.png").write_bytes(png(8, 8, 16, 2, rows))
    with pytest.warns(UserWarning, match="1 of 4 images have 16 bits in each of several channels, and only 8 are read"):
        assert data.load(path).train.x[0, :, 0, 0].tolist() == [0, 2, 4]
    path = make(tmp_path / "frames", Image.fromarray(GREY), ending="gif")
    Image.fromarray(GREY).save(
        path / "test" / "b" / "0.gif", save_all=True, append_images=[Image.fromarray(GREY.T)], duration=50
    )
    with pytest.warns(UserWarning, match="1 of 4 images have several frames or pages, and only the first is read"):
        data.load(path)


def test_an_image_that_claims_to_be_huge_is_refused(tmp_path):
    path = make(tmp_path / "mine", Image.fromarray(GREY))
    (path / "test" / "b" / "0.png").write_bytes(png(10**5, 10**5, 8, 0, b""))
    with pytest.raises(ValueError, match=r"b.0\.png is too large an image \(.*10000000000 pixels.*Scale it down"):
        data.load(path)


def test_an_image_that_is_cut_short_is_named(tmp_path):
    path = make(tmp_path / "mine", Image.fromarray(COLOUR))
    file = path / "train" / "b" / "0.png"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"b.0\.png cannot be read as an image"):
        data.load(path)


@pytest.mark.parametrize("cut", [-40, 4], ids=["pixels", "header"])
def test_all_files_with_faults_are_named_at_a_time(tmp_path, cut):
    path = make(tmp_path / "mine", *[Image.fromarray(COLOUR)] * 12)
    files = sorted(path.glob("train/*/*.png"))
    for file in files[:2]:
        file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=rf"{files[0]} cannot be read .* 2 files have faults, also {files[1]}\.$"):
        data.load(path)
    for file in files[2:]:
        file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=rf"24 files have faults, also .*{files[9].name}, \.\.\.\.$"):
        data.load(path)


# ---------------------------------------------------------------- new images, for a trained network


def test_new_images_take_the_form_of_the_training_set(tmp_path):
    Image.fromarray(GREY).save(tmp_path / "a.png")
    Image.fromarray(COLOUR).save(tmp_path / "b.png")
    Image.fromarray(RAMP).save(tmp_path / "c.png")
    Image.fromarray(np.tile(GREY, (3, 5))).save(tmp_path / "d.jpg")
    paths = find_images(str(tmp_path))
    assert [path.name for path in paths] == ["a.png", "b.png", "c.png", "d.jpg"]
    colour = ImageFiles.like(paths, (3, 8, 8), deep=False)
    assert colour[:].shape == (4, 3, 8, 8)
    assert colour[:].dtype == np.uint8
    assert (colour[:1][0] == GREY).all()
    assert (colour[1:2][0] == COLOUR.transpose(2, 0, 1)).all()
    assert (colour[2:3][0, 0] == np.round(RAMP * (255 / 65535))).all()  # 16 bits for a network of 8-bit images
    deep = ImageFiles.like(paths, (1, 8, 8), deep=True)
    np.testing.assert_allclose(deep[2:3][0, 0], RAMP / 65535, rtol=1e-6)
    np.testing.assert_allclose(deep[:1][0, 0], GREY / 255, rtol=1e-6)


def test_new_images_are_found_by_file_folder_and_pattern(tmp_path):
    for name in ("one.png", "two.png", "three.jpg", "sub/four.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(GREY).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / ".hidden.png").write_bytes(b"")

    def names(given):
        return [path.name for path in find_images(str(tmp_path / given)) or ()]

    assert names("one.png") == ["one.png"]
    assert names(".") == ["one.png", "three.jpg", "two.png"]
    assert names("t*") == ["three.jpg", "two.png"]
    assert names("**/*.png") == ["one.png", "four.png", "two.png"]
    assert names("*.txt") == []
    assert find_images(str(tmp_path / "rows.npy")) is None
    (tmp_path / "empty").mkdir()
    for given, sentence in (("none.png", "there is no image"), ("empty", "has no images; expected files")):
        with pytest.raises(FileNotFoundError, match=sentence):
            names(given)


def test_an_image_that_is_given_twice_is_read_twice(tmp_path):
    Image.fromarray(GREY).save(tmp_path / "a.png")
    new = ImageFiles.like([tmp_path / "a.png"] * 2, (1, 8, 8), deep=False)
    np.testing.assert_array_equal(new[:2], np.stack([GREY[None]] * 2))


def test_new_images_that_cannot_be_read_are_named(tmp_path):
    Image.fromarray(GREY).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"b\.png cannot be read as an image"):
        ImageFiles.like(find_images(str(tmp_path)), (1, 8, 8), deep=False)
    with pytest.raises(ValueError, match="which are grey or have three colours"):
        ImageFiles.like([tmp_path / "a.png"], (4,), deep=False)


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp"])
def test_photos_are_turned_as_their_exif_orientation_says(tmp_path, ending):
    stored = Image.fromarray(np.repeat(np.repeat(COLOUR[:, :4], 4, 0), 4, 1))  # 32 high, 16 wide; seen 16 high, 32 wide
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by a quarter, clockwise
    mine = data.load(make(tmp_path / "photos", stored, ending=ending, exif=turned, quality=100))
    assert mine.input_shape == (3, 16, 32)
    seen = np.rot90(np.asarray(stored), -1).transpose(2, 0, 1).astype(int)
    assert np.abs(mine.train.x[0].numpy().astype(int) - seen).mean() < 12
    new = ImageFiles.like([tmp_path / "photos" / "test" / "a" / f"0.{ending}"], (3, 16, 32), deep=False)
    np.testing.assert_array_equal(new[:1][0], mine.test.x[0].numpy())


def test_an_orientation_may_be_in_xmp(tmp_path):
    stored = Image.fromarray(COLOUR[:, :4])
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'
    assert data.load(make(tmp_path / "photos", stored, ending="webp", xmp=xmp)).input_shape == (3, 4, 8)


@pytest.mark.parametrize("ending", ["png", "webp"])
def test_a_photo_with_damaged_exif_is_read(tmp_path, ending):
    folder = make(tmp_path / "photos", Image.fromarray(COLOUR[:, :4]), ending=ending, exif=b"Exif\0\0damaged")
    assert data.load(folder).input_shape == (3, 8, 4)


def test_hidden_files_of_other_systems_are_no_images(tmp_path):
    folder = make(tmp_path / "mine", Image.fromarray(GREY))
    (folder / "train" / "a" / "._0.png").write_bytes(b"\0\5\26\7 made by another system")
    (folder / "train" / "a" / ".DS_Store").write_bytes(b"")
    (folder / "train" / "a" / "notes.txt").write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(data.load(folder).train) == 2


@pytest.mark.parametrize("place", ["train/loose.png", "train/a/1.jfif", "train/a/more/1.png", "test/b/1.heic"])
def test_images_that_are_not_read_are_said(tmp_path, place):
    folder = make(tmp_path / "mine", Image.fromarray(GREY))
    (folder / place).parent.mkdir(exist_ok=True)
    shutil.copy(folder / "train" / "a" / "0.png", folder / place)
    with pytest.warns(UserWarning, match=f"images in .* that are not read: 1, such as {place};") as told:
        assert len(data.load(folder).train) == 2
    assert [warning.filename for warning in told] == [__file__]
