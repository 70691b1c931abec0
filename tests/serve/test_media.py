"""What clients send as media: refused by name, or one canonical picture and its key."""

import base64
import urllib.parse
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from easerve.serve.media import MediaError, decode, prepare

from .conftest import Serve
from .server import (
    MAX_PIXELS,
    Server,
    answer,
    answer_of,
    data_url,
    encoded,
    error_of,
    image_part,
    key,
    picture,
    text_part,
)

RED = picture("red")
PNG = base64.b64decode(RED.partition(",")[2])
BASE64 = base64.b64encode(PNG).decode()
WHITE = (255, 255, 255)

BAD = {
    "http": ("http://example.org/a.png", "http: URLs cannot be fetched"),
    "https": ("HTTPS://example.org/a.png", "https: URLs cannot be fetched"),
    "file": ("file:///etc/passwd", "file: URLs cannot be fetched"),
    "ftp": ("ftp://example.org/a.png", "ftp: URLs cannot be fetched"),
    "a path": ("/etc/passwd", "send the picture as a data: URL"),
    "a path with a colon": ("../a:b", "send the picture as a data: URL"),
    "nothing": ("", "send the picture as a data: URL"),
    "bare base64": (BASE64, "send the picture as a data: URL"),
    "no comma": ("data:image/png;base64", "no comma"),
    "empty": ("data:image/png;base64,", "is empty"),
    "junk base64": ("data:image/png;base64,@@@@", "not valid base64"),
    "base64 cut short": (f"data:image/png;base64,{BASE64[:-3]}", "not valid base64"),
    "not ascii": ("data:image/png;base64,äöü=", "not valid base64"),
    "only blanks": ("data:image/png;base64,  %20", "not a picture of a known format"),
    "truncated PNG": (data_url(PNG[:-24]), "broken"),
    "header only": (data_url(PNG[:8]), "not a picture of a known format"),
    "text as PNG": (data_url(b"hello"), "not a picture of a known format"),
    "SVG": (data_url(b"<svg/>", "image/svg+xml"), "not a picture of a known format"),
    "too many pixels": (picture("red", (1001, 1000)), "1001x1000; at most 1000000 pixels"),
}

GOOD = {
    "plain": RED,
    "scheme in capitals": RED.replace("data:", "DATA:"),
    "parameters first": f"data:image/png;name=a.png;charset=utf-8;base64,{BASE64}",
    "BASE64 in capitals": f"data:image/png;BASE64,{BASE64}",
    "blanks in the header": f"data:image/png; base64,{BASE64}",
    "no media type": f"data:;base64,{BASE64}",
    "the wrong media type": f"data:image/jpeg;base64,{BASE64}",
    "escaped base64": f"data:image/png;base64,{urllib.parse.quote(BASE64, safe='')}",
    "all of it escaped": "data:image/png;base64," + "".join(f"%{ord(c):02x}" for c in BASE64),
    "raw bytes, escaped": f"data:image/png,{urllib.parse.quote_from_bytes(PNG)}",
    "wrapped lines": f"data:image/png;base64,{BASE64[:40]}\r\n{BASE64[40:80]}\n\t{BASE64[80:]}",
    "blanks around": f"  \n{RED}\n ",
}


@pytest.mark.parametrize(("url", "message"), BAD.values(), ids=BAD)
async def test_bad_media_are_refused_by_the_path_of_their_part(
    serve: Serve, url: str, message: str
) -> None:
    server = await serve(limits={"max_image_pixels": MAX_PIXELS})
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "user", "content": [text_part("which?"), image_part(RED), image_part(url)]},
    ]
    response = await server.post({"model": "fake-model", "messages": messages})
    error = error_of(response, 400)
    path = "messages[1].content[2].image_url.url"
    assert error["param"] == path
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{path}: ")
    assert message in error["message"]
    assert server.num_calls("render") == 0


async def test_the_first_of_several_bad_parts_is_named(server: Server) -> None:
    bad = [image_part(RED), image_part("file:///a"), image_part("http://b")]
    assert error_of(await server.ask(bad), 400)["param"] == "messages[0].content[1].image_url.url"


async def test_a_long_scheme_is_not_sent_back(server: Server) -> None:
    error = error_of(await server.ask([image_part("a" * 100_000 + ":b")]), 400)
    assert len(error["message"]) < 1000


def test_what_else_changes_the_embedding_changes_the_key_and_not_the_picture() -> None:
    made = [prepare(RED, MAX_PIXELS, options) for options in ("", "model|a|", "model|b|")]
    assert len({picture.key for picture in made}) == 3
    assert len({picture.url for picture in made}) == 1


@pytest.mark.parametrize("url", GOOD.values(), ids=GOOD)
def test_every_form_of_a_data_url_has_the_same_key(url: str) -> None:
    assert key(url) == key(RED)


async def test_every_form_of_a_data_url_is_answered(server: Server) -> None:
    urls = list(GOOD.values())
    for some in (urls[:6], urls[6:]):
        response = await server.ask([*map(image_part, some), text_part("which?")])
        assert answer_of(response) == answer("which?", *[RED] * 6)


@pytest.mark.parametrize("size", [(4, 3), (600, 400)], ids=["small", "well compressed"])
def test_the_canonical_url_has_the_same_key(size: tuple[int, int]) -> None:
    prepared = prepare(picture("red", size), MAX_PIXELS)
    assert (prepared.width, prepared.height) == size
    assert prepared.url.startswith("data:image/")
    assert key(prepared.url) == prepared.key


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_lossless_format_has_the_same_key_as_any_other(kind: str) -> None:
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    image = Image.new("RGB", (4, 3), "red")
    assert key(data_url(encoded(image, kind, **options))) == key(RED)


def test_a_jpeg_is_decoded() -> None:
    image = decode(encoded(Image.new("RGB", (8, 8), "white"), "JPEG"), MAX_PIXELS)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (8, 8), WHITE)


# Colours and geometry -----------------------------------------------------------------------------


def pixels(mode: str, *values: object) -> Image.Image:
    """A picture of one row."""
    image = Image.new(mode, (len(values), 1))
    for x, value in enumerate(values):
        image.putpixel((x, 0), value)  # type: ignore[arg-type]
    return image


def palette(transparent: int | None = None) -> bytes:
    image = pixels("P", 0, 1, 2)
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    options: dict[str, Any] = {} if transparent is None else {"transparency": transparent}
    return encoded(image, **options)


def animation() -> bytes:
    frames = [Image.new("RGB", (2, 1), color) for color in ("red", "green", "blue")]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


R, G, B = (255, 0, 0), (0, 255, 0), (0, 0, 255)
MODES = {
    "1": (encoded(pixels("1", 0, 255)), [(0, 0, 0), WHITE]),
    "L": (encoded(pixels("L", 0, 77)), [(0, 0, 0), (77, 77, 77)]),
    "L with a transparent value": (encoded(pixels("L", 9, 77), transparency=9), [WHITE, (77,) * 3]),
    "LA": (encoded(pixels("LA", (9, 0), (77, 255))), [WHITE, (77, 77, 77)]),
    "P": (palette(), [R, G, B]),
    "P with a transparent colour": (palette(transparent=1), [R, WHITE, B]),
    "RGB": (encoded(pixels("RGB", R, G)), [R, G]),
    "RGB with a transparent colour": (
        encoded(pixels("RGB", R, G), transparency=G),
        [R, WHITE],
    ),
    "RGBA": (
        encoded(pixels("RGBA", (9, 9, 9, 0), (0, 0, 0, 51), (*R, 255))),
        [WHITE, (204, 204, 204), R],
    ),
    "CMYK": (encoded(pixels("CMYK", (0, 255, 255, 0), (0, 0, 0, 0)), "TIFF"), [R, WHITE]),
    "16 bits": (encoded(pixels("I;16", 0, 0x4D00, 0xFFFF)), [(0, 0, 0), (77, 77, 77), WHITE]),
    "an animation's first frame": (animation(), [R, R]),
}


@pytest.mark.parametrize(("content", "expected"), MODES.values(), ids=MODES)
def test_every_mode_becomes_rgb(content: bytes, expected: list[tuple[int, int, int]]) -> None:
    image = decode(content, MAX_PIXELS)
    assert image.mode == "RGB"
    assert [image.getpixel((x, 0)) for x in range(image.width)] == expected


@pytest.mark.parametrize("content", [content for content, _ in MODES.values()], ids=MODES)
async def test_every_mode_is_answered(server: Server, content: bytes) -> None:
    url = data_url(content)
    assert answer_of(await server.ask([image_part(url)])) == answer("", url)


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(pixels("RGB", R, G), exif=exif)


TURN: dict[int, Callable[[Image.Image], Image.Image]] = {
    1: lambda image: image,
    2: lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    3: lambda image: image.transpose(Image.Transpose.ROTATE_180),
    6: lambda image: image.transpose(Image.Transpose.ROTATE_270),
    8: lambda image: image.transpose(Image.Transpose.ROTATE_90),
}


@pytest.mark.parametrize("orientation", TURN)
def test_a_picture_is_turned_as_its_exif_says(orientation: int) -> None:
    upright = encoded(TURN[orientation](pixels("RGB", R, G)))
    assert key(data_url(oriented(orientation))) == key(data_url(upright))


def test_colours_hidden_by_transparency_make_no_difference() -> None:
    first = encoded(pixels("RGBA", (1, 2, 3, 0), (*R, 255)))
    second = encoded(pixels("RGBA", (200, 100, 0, 0), (*R, 255)))
    assert first != second
    assert key(data_url(first)) == key(data_url(second))


@pytest.mark.parametrize("size", [(2, 8), (8, 2), (4, 4), (1, 16), (16, 1)])
def test_equal_bytes_of_another_geometry_have_another_key(size: tuple[int, int]) -> None:
    assert key(picture("red", size)) != key(picture("red", (32, 1)))
    others = [other for other in [(2, 8), (8, 2), (4, 4), (1, 16), (16, 1)] if other != size]
    assert key(picture("red", size)) not in {key(picture("red", other)) for other in others}


def test_the_bound_on_pixels_is_inclusive() -> None:
    content = encoded(Image.new("1", (10, 10)))
    assert decode(content, 100).size == (10, 10)
    with pytest.raises(MediaError, match="10x10; at most 99 pixels"):
        decode(content, 99)
