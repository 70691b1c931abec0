"""What costs need to know of a model: one YAML file each, every section with its source.

A number of weights counts matrices, embeddings, norms and biases alike. A matrix is (inputs,
outputs); its product takes two FLOPs for each weight and row.
"""

from math import ceil
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from easerve.config import Positive, Section, read_named

FOLDER = Path(__file__).parent / "models"
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Matrix = tuple[Positive, Positive]


class Language(Section):
    """A decoder: grouped-query attention and a gated MLP in every layer.

    ``layer_vectors``: values of the norms and biases of a layer. ``num_window_layers`` of the
    layers attend to the last ``window`` tokens only. ``value_bytes``: of a weight, of an
    activation, of a value in the KV cache.
    """

    source: Text
    num_layers: Positive
    hidden: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    intermediate: Positive
    vocab: Positive
    tied_embeddings: bool = False
    layer_vectors: Count = 0
    window: Positive | None = None
    num_window_layers: Count = 0
    value_bytes: Positive = 2

    @model_validator(mode="after")
    def _layers_add_up(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}"
            )
        if self.num_window_layers > self.num_layers:
            raise ValueError(f"num_window_layers must be at most {self.num_layers} (num_layers)")
        if (self.window is None) is (self.num_window_layers > 0):
            raise ValueError("window and num_window_layers: give both or neither")
        return self

    @property
    def num_global_layers(self) -> int:
        """That attend to all tokens."""
        return self.num_layers - self.num_window_layers

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values of the keys of a token in a layer; as many are its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> tuple[Matrix, ...]:
        """As engines multiply them: queries, keys and values; output; gate and up; down."""
        return (
            (self.hidden, self.query_size + 2 * self.kv_size),
            (self.query_size, self.hidden),
            (self.hidden, 2 * self.intermediate),
            (self.intermediate, self.hidden),
        )

    @property
    def num_layer_weights(self) -> int:
        """Of the matrices of all layers: what each token is multiplied with."""
        return self.num_layers * _weights(self.layer_matrices)

    @property
    def num_weights(self) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        vectors = self.num_layers * self.layer_vectors + self.hidden
        return embeddings + self.num_layer_weights + vectors

    @property
    def weight_bytes(self) -> int:
        return self.num_weights * self.value_bytes

    @property
    def embedding_bytes_per_token(self) -> int:
        """Of what an encoder hands to prefill."""
        return self.hidden * self.value_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """In all layers: of a token that no window has left behind."""
        return self._kv_bytes_of_layer * self.num_layers

    def kv_bytes(self, num_tokens: int) -> int:
        """The KV cache of a sequence; layers with a window keep no more than the window."""
        kept = num_tokens if self.window is None else min(num_tokens, self.window)
        in_layers = self.num_global_layers * num_tokens + self.num_window_layers * kept
        return self._kv_bytes_of_layer * in_layers

    @property
    def _kv_bytes_of_layer(self) -> int:
        return 2 * self.kv_size * self.value_bytes


class Tiles(Section):
    """Pictures are cut into square tiles of ``side`` pixels, a sequence each (CLIP).

    ``canvases``: (height, width) of the grids of tiles that a picture may be laid on, beside the
    whole picture as one tile (LLaVA-NeXT); none: a picture is one tile (LLaVA).
    """

    side: Positive
    patch: Positive
    canvases: tuple[tuple[Positive, Positive], ...] = ()

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.side % self.patch:
            raise ValueError(f"patch {self.patch} does not divide side {self.side}")
        for height, width in self.canvases:
            if height % self.side or width % self.side:
                raise ValueError(
                    f"canvases must be whole tiles of {self.side} pixels, not {height}x{width}"
                )
        return self

    @property
    def num_patches(self) -> int:
        """Of a tile."""
        return (self.side // self.patch) ** 2


class Grid(Section):
    """Pictures and videos keep their proportions, and every ``merge``² patches become a token.

    ``temporal``: frames in a patch. ``min_pixels`` and ``max_pixels``: of a picture after it was
    resized. ``video_min_pixels`` and ``video_max_pixels``: of a frame; ``video_total_pixels``: of
    all frames of a video, where the most wins over the least of a frame. None: no such bound.
    """

    patch: Positive
    merge: Positive
    temporal: Positive
    min_pixels: Positive
    max_pixels: Positive
    video_min_pixels: Positive
    video_max_pixels: Positive
    video_total_pixels: Positive | None = None


class Pieces(Section):
    """Sound is cut into pieces of ``piece_s`` seconds, a sequence each (Whisper).

    ``frames_per_s``: of the encoder's output. ``stack``: frames that become one token.
    """

    piece_s: Positive
    frames_per_s: Positive
    stack: Positive


class Encoder(Section):
    """A transformer over patches of pictures or frames of sound, and its projector.

    ``num_layers``: those that run. ``head_dim``: values of a head. ``gated``: the MLP has three
    matrices, not two. ``patches``: the matrices that make a token of the sequence of its input
    values; ``patch_rows``: of each, its rows for one token (a convolution before a stride has
    more). ``num_extra``: tokens of a sequence that are no patches (a class token). ``window``: the
    most tokens among which attention stays, but in ``num_global_layers`` of the layers.
    ``other_weights``: positions, norms and biases.
    """

    source: Text
    num_layers: Positive
    hidden: Positive
    num_heads: Positive
    head_dim: Positive
    intermediate: Positive
    gated: bool = False
    patches: Annotated[tuple[Matrix, ...], Field(min_length=1)]
    patch_rows: tuple[Positive, ...] = (1,)
    num_extra: Count = 0
    window: Positive | None = None
    num_global_layers: Count = 0
    projector: Annotated[tuple[Matrix, ...], Field(min_length=1)]
    other_weights: Count = 0
    value_bytes: Positive = 2
    tiles: Tiles | None = None
    grid: Grid | None = None
    pieces: Pieces | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if len(self.patches) != len(self.patch_rows):
            raise ValueError("patches and patch_rows must be of one length")
        if (self.window is None) is (self.num_global_layers > 0):
            raise ValueError("window and num_global_layers: give both or neither")
        if self.num_global_layers > self.num_layers:
            raise ValueError(f"num_global_layers must be at most {self.num_layers} (num_layers)")
        if sum(part is not None for part in (self.tiles, self.grid, self.pieces)) != 1:
            raise ValueError("give one of tiles, grid and pieces: what media become")
        return self

    @property
    def merge(self) -> int:
        """Tokens of a sequence that the projector takes as one."""
        if self.grid is not None:
            return self.grid.merge**2
        return 1 if self.pieces is None else self.pieces.stack

    @property
    def layer_matrices(self) -> tuple[Matrix, ...]:
        """Queries, keys and values; output; gate and up, or up; down."""
        heads = self.num_heads * self.head_dim
        return (
            (self.hidden, 3 * heads),
            (heads, self.hidden),
            (self.hidden, self.intermediate * (2 if self.gated else 1)),
            (self.intermediate, self.hidden),
        )

    @property
    def num_weights(self) -> int:
        """Of what is loaded: layers that do not run are not."""
        layers = self.num_layers * _weights(self.layer_matrices)
        return _weights(self.patches) + layers + _weights(self.projector) + self.other_weights

    @property
    def weight_bytes(self) -> int:
        return self.num_weights * self.value_bytes

    def num_projected(self, sequence_tokens: int) -> int:
        """Rows of the projector's product for a sequence of so many tokens."""
        return ceil((sequence_tokens - self.num_extra) / self.merge)


class ModelSpec(Section):
    """A multimodal model: an encoder whose embeddings a language model reads."""

    title: Text
    architecture: Literal[
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "UltravoxModel",
    ]
    """As config.json names it: what vLLM takes it for."""
    repository: Text | None = None
    """Where engines get it from, as in ``owner/name``; None: its folder has to be named."""
    language: Language
    encoder: Encoder

    @property
    def num_weights(self) -> int:
        return self.language.num_weights + self.encoder.num_weights


def names() -> list[str]:
    """Of the models that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read(name: str, folder: Path = Path()) -> ModelSpec:
    """The model of that name, or of that YAML file; a relative path is taken from ``folder``.

    Raises ConfigError, which names the file and the key.
    """
    return read_named(name, "model", FOLDER, folder, ModelSpec)


def _weights(matrices: tuple[Matrix, ...]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices)
