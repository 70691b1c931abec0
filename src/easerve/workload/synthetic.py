"""Pictures, videos and sounds that nobody has seen before, as files.

What is made depends on its size and on the random numbers given, so the same seed gives the same
bytes, as long as Pillow and FFmpeg are the same. A ``number`` is stamped into each: two items
with different numbers are different after decoding too, so that no server finds one in a cache.

Pictures are noise over soft colours and shapes. They compress like photographs (a JPEG of 1280x720
has about 200 kB); pure noise, which vLLM's bench sends, has 550 kB.
"""

import io
import random
import sys
import wave
from array import array
from collections.abc import Iterator
from typing import Any, Literal

from PIL import Image, ImageDraw

PictureFormat = Literal["jpeg", "png"]

MIN_SIDE = 8  # pixels
STAMP_BITS = 48
BLOCK, BLOCKS_ACROSS = 8, 8  # pixels of a side of what JPEG encodes as one; of them in a row
MIN_BLOCKS_SIDE = 80  # pixels; the blocks take 64x48 and must leave something of the picture
DARK, LIGHT = 48, 208
NOISE = 0.15  # of a picture, the rest is structure
NUM_THINGS = 6
# Models take one or two frames of a second: at this rate they see every frame that was asked.
FRAMES_PER_S = 2
PAN = 4  # pixels that the camera moves from frame to frame
SAMPLES_PER_S = 16_000
SYLLABLE_S = 0.1
LOUDNESSES = (2, 8, 24, 48)  # of 128


class MissingPackageError(Exception):
    """A package that only this needs is not installed."""


def picture(width: int, height: int, number: int, rng: random.Random) -> Image.Image:
    """A picture in RGB. Raises ValueError for a side of less than ``MIN_SIDE`` pixels."""
    if min(width, height) < MIN_SIDE:
        raise ValueError(f"both sides must be {MIN_SIDE} pixels or more, not {width}x{height}")
    drawn = _drawn(width, height, rng)
    stamp(drawn, number)
    return drawn


def _drawn(width: int, height: int, rng: random.Random) -> Image.Image:
    corners = Image.frombytes("RGB", (2, 2), rng.randbytes(12))
    image = corners.resize((width, height), Image.Resampling.BILINEAR)
    canvas = ImageDraw.Draw(image)
    for _ in range(NUM_THINGS):
        left, top = rng.randrange(width), rng.randrange(height)
        box = (left, top, left + rng.randint(1, width // 2), top + rng.randint(1, height // 2))
        draw = canvas.ellipse if rng.random() < 0.5 else canvas.rectangle
        draw(box, fill=tuple(rng.randbytes(3)))
    noise = Image.frombytes("L", (width, height), rng.randbytes(width * height))
    return Image.blend(image, noise.convert("RGB"), NOISE)


def stamp(image: Image.Image, number: int) -> None:
    """Write a number into the upper left corner, as blocks that compression leaves apart.

    Pictures too small for the blocks get it in the lowest bits of their first pixels, which only
    survive a PNG; small videos are kept apart by their noise alone.
    """
    bits = [number >> bit & 1 for bit in range(STAMP_BITS)]
    if not has_blocks(image.size):
        image.paste(_in_low_bits(image, bits))
        return
    canvas = ImageDraw.Draw(image)
    for place, bit in enumerate(bits):
        left, top = BLOCK * (place % BLOCKS_ACROSS), BLOCK * (place // BLOCKS_ACROSS)
        box = (left, top, left + BLOCK - 1, top + BLOCK - 1)
        canvas.rectangle(box, fill=(LIGHT if bit else DARK,) * 3)


def has_blocks(size: tuple[int, int]) -> bool:
    return min(size) >= MIN_BLOCKS_SIDE


def _in_low_bits(image: Image.Image, bits: list[int]) -> Image.Image:
    pixels = bytearray(image.tobytes())
    for place, bit in enumerate(bits):
        pixels[place] = (pixels[place] & 0xFE) | bit
    return Image.frombytes("RGB", image.size, bytes(pixels))


def encoded(image: Image.Image, form: PictureFormat | None = None) -> tuple[bytes, PictureFormat]:
    """The picture as a file, and in which format.

    None is JPEG, as vLLM's bench and most clients send it: of 1280x720, a PNG takes 0.3 s instead
    of 0.02 s and has nine times the bytes. Pictures without room for the stamp's blocks are PNG in
    any case, since JPEG could make two of them equal.
    """
    form = "png" if not has_blocks(image.size) else form or "jpeg"
    file = io.BytesIO()
    image.save(file, form.upper())
    return file.getvalue(), form


def video(width: int, height: int, frames: int, number: int, rng: random.Random) -> bytes:
    """An MP4 (H.264) of a camera that moves over a picture, ``FRAMES_PER_S`` frames a second.

    Raises ValueError for sides that are odd or too small, MissingPackageError without PyAV.
    """
    if width % 2 or height % 2:
        raise ValueError(f"the sides of a video must be even, not {width}x{height}")
    if min(width, height) < 2 * MIN_SIDE:
        raise ValueError(f"the sides of a video must be {2 * MIN_SIDE} or more: {width}x{height}")
    av = _pyav()
    file = io.BytesIO()
    # One thread and no time of making: the same bytes at any time, on any number of cores.
    with av.open(file, "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_S, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        for image in _frames(width, height, frames, number, rng):
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode(None))
    return file.getvalue()


def _pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise MissingPackageError(
            f"videos are made by PyAV, which cannot be used: {error}; pip install av"
        ) from None
    return av


def _frames(
    width: int, height: int, num: int, number: int, rng: random.Random
) -> Iterator[Image.Image]:
    scene = _drawn(width + PAN * (num - 1), height, rng)
    for position in range(num):
        frame = scene.crop((PAN * position, 0, PAN * position + width, height))
        stamp(frame, number)
        yield frame


def sound(seconds: float, number: int, rng: random.Random) -> bytes:
    """A WAV, 16 kHz, mono, 16 bits: noise as loud as syllables are, a tenth of a second each."""
    num = max(STAMP_BITS, round(seconds * SAMPLES_PER_S))
    samples = bytearray(rng.randbytes(2 * num))
    step = 2 * round(SYLLABLE_S * SAMPLES_PER_S)
    for start in range(0, len(samples), step):
        high = slice(start + 1, start + step, 2)
        samples[high] = samples[high].translate(rng.choice(QUIETER))
    mark = array("h", ((1 if number >> bit & 1 else -1) << 12 for bit in range(STAMP_BITS)))
    if sys.byteorder == "big":
        mark.byteswap()
    samples[: 2 * STAMP_BITS] = mark.tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLES_PER_S)
        writer.writeframes(bytes(samples))
    return file.getvalue()


def _quieter(loudness: int) -> bytes:
    """For the high byte of a sample: any value -> one from -loudness to loudness - 1."""
    return bytes((value * 2 * loudness // 256 - loudness) & 0xFF for value in range(256))


QUIETER = tuple(map(_quieter, LOUDNESSES))
