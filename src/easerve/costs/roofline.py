"""FLOPs and bytes of an encoder forward, from the model's configuration: its place under the roof.

A multiply-add is two FLOPs; matrix products, convolutions and attention are counted, nothing else.
Weights are read once per forward. Activations are read and written once per operation, with an
attention that keeps its scores to itself. Arithmetic intensity is FLOPs over all these bytes; a
device that does P FLOP/s and moves B bytes/s is bound by memory below an intensity of P / B
(Williams, Waterman, Patterson: Roofline, 2009).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

# A configuration leaves out what is the default of its class in transformers.
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "clip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "image_size": 224,
        "patch_size": 32,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "image_size": 224,
        "patch_size": 16,
    },
    "pixtral": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "image_size": 1024,
        "patch_size": 16,
    },
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llava": {"vision_feature_layer": -2},
    "llava_next": {
        "vision_feature_layer": -2,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
    "mistral3": {"vision_feature_layer": -1, "spatial_merge_size": 2},
}
PICTURE_SIDE = 336
TEXT_HIDDEN = 4096  # of LlamaConfig and MistralConfig
NUM_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Work:
    """Of a forward."""

    flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.num_bytes


@dataclass(frozen=True, slots=True)
class Encoder:
    """A vision transformer and its projector, for pictures of one size.

    A picture is ``num_tiles`` sequences of ``num_patches`` and ``num_extra`` tokens (a class
    token). ``mlp_matrices``: 2, or 3 of a gated MLP. ``projector``: (inputs, outputs) of each
    matrix, for one of ``num_projected`` tokens of a sequence.
    """

    hidden: int
    intermediate: int
    num_layers: int
    mlp_matrices: int
    patch_values: int
    num_patches: int
    num_extra: int
    num_tiles: int
    projector: tuple[tuple[int, int], ...]
    num_projected: int

    @property
    def _layer_weights(self) -> int:
        return 4 * self.hidden**2 + self.mlp_matrices * self.hidden * self.intermediate

    @property
    def _projector_weights(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.projector)

    @property
    def num_weights(self) -> int:
        """Values of all matrices that a forward reads."""
        embedding = self.patch_values * self.hidden
        return embedding + self.num_layers * self._layer_weights + self._projector_weights

    @property
    def item_flops(self) -> float:
        """Of one picture."""
        length = self.num_patches + self.num_extra
        attention = 4 * length**2 * self.hidden
        layer = 2 * length * self._layer_weights + attention
        embedding = 2 * self.num_patches * self.patch_values * self.hidden
        projector = 2 * self.num_projected * self._projector_weights
        return self.num_tiles * (embedding + self.num_layers * layer + projector)

    @property
    def item_values(self) -> float:
        """Values of one picture that its operations read and write.

        Of a token in a layer: norms, queries with keys and values, attention, its output, residuals
        and the ends of the MLP are 22 hidden vectors; inner vectors of the MLP are written once and
        read once, as is what the activation makes of them.
        """
        length = self.num_patches + self.num_extra
        layer = length * (22 * self.hidden + 2 * self.mlp_matrices * self.intermediate)
        embedding = self.num_patches * (self.patch_values + self.hidden)
        projector = self.num_projected * sum(sum(matrix) for matrix in self.projector)
        return self.num_tiles * (embedding + self.num_layers * layer + projector)

    def forward(self, batch: int, value_bytes: int) -> Work:
        """``value_bytes``: of a weight, of an activation."""
        values = self.num_weights + batch * self.item_values
        return Work(batch * self.item_flops, value_bytes * values)


def encoder(config: Mapping[str, Any], width: int, height: int) -> Encoder | None:
    """Of a model's config.json, for pictures of so many pixels; None: this model is not counted."""
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    kind = str(vision.get("model_type"))
    if config.get("model_type") not in MODELS or kind not in DEFAULTS:
        return None
    config = {**MODELS[config["model_type"]], **config}
    tower: Mapping[str, Any] = {**DEFAULTS[kind], **vision}
    hidden, patch = tower["hidden_size"], tower["patch_size"]
    merge: int = config.get("spatial_merge_size", 1)
    if kind == "pixtral":
        num_tiles = 1
        num_patches = _grid(width, height, tower["image_size"], patch * merge) * merge**2
    else:
        num_tiles = _num_tiles(config, width, height, tower["image_size"])
        num_patches = (tower["image_size"] // patch) ** 2
    given = config["vision_feature_layer"]
    layers: list[int] = given if isinstance(given, list) else [given]
    text: int = (config.get("text_config") or {}).get("hidden_size", TEXT_HIDDEN)
    merger = ((merge**2 * hidden, hidden),) if merge > 1 else ()
    return Encoder(
        hidden,
        tower["intermediate_size"],
        max(_num_layers(layer, tower["num_hidden_layers"]) for layer in layers),
        3 if kind == "pixtral" else 2,
        tower.get("num_channels", NUM_CHANNELS) * patch**2,
        num_patches,
        int(kind == "clip_vision_model"),
        num_tiles,
        (*merger, (len(layers) * hidden, text), (text, text)),
        num_patches // merge**2,
    )


def picture_side(config: Mapping[str, Any]) -> int:
    """Pixels of the pictures that the encoder was made for, which are squares."""
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    tower: Mapping[str, Any] = {**DEFAULTS.get(str(vision.get("model_type")), {}), **vision}
    return int(tower.get("image_size", PICTURE_SIDE))


def _num_layers(feature_layer: int, num_layers: int) -> int:
    """That run, where an output of one of them is used; -1: of the last one."""
    return feature_layer if feature_layer >= 0 else num_layers + feature_layer + 1


def _grid(width: int, height: int, largest: int, patch: int) -> int:
    """Patches of a picture that is made no larger, and kept in its proportions."""
    scale = max(width / largest, height / largest, 1.0)
    return ceil(int(width / scale) / patch) * ceil(int(height / scale) / patch)


def best_canvas(canvases: Sequence[tuple[int, int]], width: int, height: int) -> tuple[int, int]:
    """Of LLaVA-NeXT: the one that loses the least of a picture, then the smallest of these.

    A canvas is (height, width) in pixels.
    """

    def fit(canvas: tuple[int, int]) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, -canvas[0] * canvas[1]

    return max(canvases, key=fit)


def _num_tiles(config: Mapping[str, Any], width: int, height: int, side: int) -> int:
    """Of LLaVA-NeXT: those of the canvas that fits best, and the whole picture; of others one."""
    canvases: list[tuple[int, int]] = config.get("image_grid_pinpoints") or []
    if not canvases:
        return 1
    best = best_canvas(canvases, width, height)
    return best[0] // side * (best[1] // side) + 1
