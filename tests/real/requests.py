"""Messages with pictures, as clients send them."""

import random
from typing import Any

from PIL import Image

from easerve.workload import shapes


def picture_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": shapes.data_url(image)}}


def picture_of(seed: int, size: tuple[int, int] | None = None) -> dict[str, Any]:
    """A scene of shapes, stretched to another size if asked."""
    picture = shapes.draw(random.Random(seed)).picture
    return picture_part(picture.resize(size) if size else picture)


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}
