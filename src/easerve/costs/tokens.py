"""What a model makes of a picture, video or sound: tokens of the prompt, sequences of the encoder.

The numbers are those of vLLM 0.32 and of the processors that it calls; a test compares the two.
"""

from math import ceil, floor, sqrt

from easerve.costs.base import Media
from easerve.costs.models import Encoder, Grid, ModelSpec, Pieces, Tiles
from easerve.costs.roofline import best_canvas
from easerve.types import Content, Modality, Picture, Sound, Video

MAX_ASPECT = 200  # of a picture that keeps its proportions
SAMPLE_RATE = 16_000  # Whisper: samples per second
STRIDE = 2  # frames of the spectrogram that become one of the encoder


def media(model: ModelSpec, content: Content) -> Media:
    """Raises ValueError for what the model does not take."""
    encoder = model.encoder
    match content:
        case Picture() if encoder.tiles is not None:
            return _tiled(content, encoder, encoder.tiles)
        case Picture() if encoder.grid is not None:
            return _picture(content, encoder.grid)
        case Video() if encoder.grid is not None:
            return _video(content, encoder.grid)
        case Sound() if encoder.pieces is not None:
            return _sound(content, encoder.pieces)
        case _:
            kind = type(content).__name__.lower()
            raise ValueError(f"{model.title} takes no {kind}: {content}")


def _tiled(picture: Picture, encoder: Encoder, tiles: Tiles) -> Media:
    """A tile is a sequence; its patches become a token each."""
    num_tiles, num_tokens = 1, tiles.num_patches
    if tiles.canvases:
        height, width = best_canvas(tiles.canvases, picture.width, picture.height)
        rows, columns = height // tiles.side, width // tiles.side
        num_tiles += rows * columns
        num_tokens += _unpadded(picture, rows, columns, tiles.side // tiles.patch)
    return Media(Modality.IMAGE, num_tokens, num_tiles, tiles.num_patches + encoder.num_extra)


def _unpadded(picture: Picture, rows: int, columns: int, patches: int) -> int:
    """Patches of the tiles that are not padding, and one token more at the end of each row.

    ``patches``: of a tile's side. Padding is cut from both sides alike.
    """
    height, width = rows * patches, columns * patches
    if picture.width / picture.height > width / height:
        used = int(round(picture.height * (width / picture.width), 7))
        height -= (height - used) // 2 * 2
    else:
        used = int(round(picture.width * (height / picture.height), 7))
        width -= (width - used) // 2 * 2
    return height * width + height


def _picture(picture: Picture, grid: Grid) -> Media:
    num_patches = _patches(picture.width, picture.height, grid, grid.min_pixels, grid.max_pixels)
    return Media(Modality.IMAGE, num_patches // grid.merge**2, 1, num_patches)


def _video(video: Video, grid: Grid) -> Media:
    """Every ``temporal`` frames are a sequence; the last frame is repeated to fill the last one."""
    most = grid.video_max_pixels
    if grid.video_total_pixels is not None:
        share = grid.video_total_pixels * grid.temporal // video.frames
        most = max(min(most, share), int(grid.video_min_pixels * 1.05))
    num_patches = _patches(video.width, video.height, grid, grid.video_min_pixels, most)
    num_sequences = ceil(video.frames / grid.temporal)
    num_tokens = num_sequences * num_patches // grid.merge**2
    return Media(Modality.VIDEO, num_tokens, num_sequences, num_patches)


def _patches(width: int, height: int, grid: Grid, least: int, most: int) -> int:
    """Of a picture that was resized to whole tokens and to ``least`` to ``most`` pixels."""
    if max(width, height) / min(width, height) > MAX_ASPECT:
        raise ValueError(f"one side must be at most {MAX_ASPECT} times the other: {width}x{height}")
    unit = grid.patch * grid.merge
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit**2 > most:
        scale = sqrt(height * width / most)
        rows = max(1, floor(height / scale / unit))
        columns = max(1, floor(width / scale / unit))
    elif rows * columns * unit**2 < least:
        scale = sqrt(least / (height * width))
        rows, columns = ceil(height * scale / unit), ceil(width * scale / unit)
    return rows * columns * grid.merge**2


def _sound(sound: Sound, pieces: Pieces) -> Media:
    """A piece is a sequence, no longer than its sound; if there are several, all are full."""
    frames_per_s = pieces.frames_per_s * STRIDE
    hop = SAMPLE_RATE // frames_per_s
    # Two are the least that the processor makes.
    num_frames = max(2, ceil(round(sound.seconds * SAMPLE_RATE) / hop))
    whole, rest = divmod(num_frames, pieces.piece_s * frames_per_s)
    full = pieces.piece_s * pieces.frames_per_s
    num_tokens = whole * ceil(full / pieces.stack) + ceil(rest / (STRIDE * pieces.stack))
    num_sequences = whole + (rest > 0)
    sequence_tokens = full if whole else ceil(rest / STRIDE)
    return Media(Modality.AUDIO, num_tokens, num_sequences, sequence_tokens)
