"""Media as clients send them -> checked, decoded, canonical. Runs in preparation workers.

A decoder that is fed hostile bytes crashes, hangs or eats memory in a process of its own; the
encoder only ever sees pictures that we wrote. Run as ``python -m easerve.serve.media LIMIT``; one
frame in, one frame out: a 4-byte length and msgpack.
"""

import base64
import binascii
import ctypes
import hashlib
import io
import re
import resource
import signal
import struct
import sys
import urllib.parse
from typing import BinaryIO

import msgspec
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
BACKGROUND = (255, 255, 255)  # under transparent pixels; vLLM's default
MAX_GROWTH = 24
SMALL = 1 << 16  # bytes of pixels that are not worth compressing
PR_SET_PDEATHSIG = 1
MEMORY_BYTES = 2 << 30
HEADER = struct.Struct("<I")


class MediaError(Exception):
    """The client's media cannot be used; the text says why."""


class Picture(msgspec.Struct):
    """``key``: sha256 of options, size and pixels. ``url``: the pixels in a lossless data URL."""

    key: str
    url: str
    width: int
    height: int


class Job(msgspec.Struct):
    url: str
    max_pixels: int
    options: str


class Result(msgspec.Struct):
    picture: Picture | None = None
    error: str | None = None


def parse_data_url(url: str) -> bytes:
    """The content of an RFC 2397 URL. Anything else is refused."""
    scheme, colon, rest = url.strip().partition(":")
    if not colon or scheme.lower() != "data":
        known = colon and re.fullmatch(r"[A-Za-z][\w+.-]{,30}", scheme)
        shown = scheme.lower() if known else None
        what = f"{shown}: URLs" if shown else "this"
        raise MediaError(f"{what} cannot be fetched; send the picture as a data: URL")
    header, comma, content = rest.partition(",")
    if not comma:
        raise MediaError("the data: URL has no comma")
    if not content:
        raise MediaError("the data: URL is empty")
    data = urllib.parse.unquote_to_bytes(content)
    if header.lower().replace(" ", "").endswith(";base64"):
        try:
            return base64.b64decode(b"".join(data.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise MediaError(f"the data: URL is not valid base64: {error}") from None
    return data


def decode(content: bytes, max_pixels: int) -> Image.Image:
    """A picture as RGB, upright, without transparency."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                size = f"{image.width}x{image.height}"
                raise MediaError(f"the picture is {size}; at most {max_pixels} pixels are allowed")
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except (MediaError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise MediaError(f"not a picture of a known format ({', '.join(FORMATS)})") from None
    except Exception as error:  # decoders raise whatever they like on broken input
        raise MediaError(f"the picture is broken: {str(error) or type(error).__name__}") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits per pixel; convert() would clip, not scale
        return image.point(lambda value: value / 256).convert("L").convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        canvas = Image.new("RGB", image.size, BACKGROUND)
        canvas.paste(image, mask=image.getchannel("A"))
        return canvas
    return image.convert("RGB")


def prepare(url: str, max_pixels: int, options: str = "") -> Picture:
    """Check and decode what a client sent. Raises MediaError.

    ``options``: everything besides the pixels that changes the embedding.
    """
    content = parse_data_url(url)
    image = decode(content, max_pixels)
    pixels = image.tobytes()
    digest = hashlib.sha256(f"{options}{image.width}x{image.height}:".encode() + pixels)
    # Uncompressed is fastest, but a tiny file must not become a huge one that the router holds.
    form = "bmp" if len(pixels) <= max(SMALL, MAX_GROWTH * len(content)) else "png"
    file = io.BytesIO()
    image.save(file, form, compress_level=1)
    encoded = base64.b64encode(file.getvalue()).decode()
    canonical = f"data:image/{form};base64,{encoded}"
    return Picture(digest.hexdigest(), canonical, image.width, image.height)


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(HEADER.size)
    return stream.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else None


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Image.MAX_IMAGE_PIXELS = None  # our own bound is checked first, and is an error, not a warning
    decoder, encoder = msgspec.msgpack.Decoder(Job), msgspec.msgpack.Encoder()
    while (frame := _read(sys.stdin.buffer)) is not None:
        job = decoder.decode(frame)
        try:
            result = Result(picture=prepare(job.url, job.max_pixels, job.options))
        except MediaError as error:
            result = Result(error=str(error))
        except MemoryError:
            result = Result(error="the picture needs too much memory")
        reply = encoder.encode(result)
        sys.stdout.buffer.write(HEADER.pack(len(reply)) + reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
