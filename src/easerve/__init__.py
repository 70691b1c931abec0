"""EAServe: encode-aware, disaggregated serving of multimodal language models."""

__version__ = "0.1.0"
