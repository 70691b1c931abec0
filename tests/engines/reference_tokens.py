"""What vLLM and transformers make of media, and how large they make the models: JSON in, JSON out.

Run in a process of its own, with the fixes that engines get (``engines/vllm/site``). Nothing is
downloaded: the configurations are written here, from the same sources as ``costs/models/``.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    AutoConfig,
    BaseVideoProcessor,
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaNextConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
)
from transformers.models.clip.modeling_clip import CLIPVisionModel
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder
from vllm.model_executor.models.llava import LlavaProcessingInfo
from vllm.model_executor.models.llava_next import LlavaNextProcessingInfo
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VisionTransformer,
    Qwen2_5_VLProcessingInfo,
)
from vllm.model_executor.models.ultravox import StackAudioFrames, UltravoxWhisperEncoder

CANVASES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
CLIP = CLIPVisionConfig(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=23,  # that are made of 24
    num_attention_heads=16,
    image_size=336,
    patch_size=14,
)
QWEN = Qwen2_5_VLConfig(
    vision_config={
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3456,
        "num_heads": 16,
        "out_hidden_size": 5120,
        "window_size": 112,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
)
WHISPER = WhisperConfig(
    d_model=1280,
    encoder_layers=32,
    encoder_attention_heads=20,
    encoder_ffn_dim=5120,
    num_mel_bins=128,
)
STACK, RATE, CONTEXT = 8, 16_000, 3000


def context(config: Any) -> Any:
    """Of vLLM's InputProcessingContext, what the token counts ask."""
    return SimpleNamespace(
        get_hf_config=lambda *_: config,
        get_merged_mm_kwargs=lambda kwargs, **_: dict(kwargs),
    )


def llava_next(sizes: list[list[int]]) -> list[tuple[int, int]]:
    info = LlavaNextProcessingInfo(
        context(LlavaNextConfig(vision_config=CLIP, image_grid_pinpoints=CANVASES))
    )
    return [
        (
            info.get_num_image_tokens(image_width=width, image_height=height),
            image_size_to_num_patches((height, width), CANVASES, 336),
        )
        for width, height in sizes
    ]


def llava(folder: str, sizes: list[list[int]]) -> list[int]:
    info = LlavaProcessingInfo(context(AutoConfig.from_pretrained(folder)))
    return [info.get_num_image_tokens(image_width=w, image_height=h) for w, h in sizes]


def qwen_pictures(sizes: list[list[int]], bounds: list[int]) -> list[tuple[int, int]]:
    info = Qwen2_5_VLProcessingInfo(context(QWEN))
    info.__dict__["supported_mm_processor_kwargs"] = {}
    processor = Qwen2VLImageProcessor(min_pixels=bounds[0], max_pixels=bounds[1])
    return [
        (
            info.get_num_image_tokens(
                image_width=width, image_height=height, image_processor=processor, mm_kwargs={}
            ),
            processor.get_number_of_image_patches(height, width),
        )
        for width, height in sizes
    ]


def qwen_videos(sizes: list[list[int]], bounds: list[int], cap: bool) -> list[tuple[int, int]]:
    """Tokens and sequences, with the size that the video processor itself resizes to."""
    processor = Qwen2VLVideoProcessor(
        min_pixels=bounds[0], max_pixels=bounds[1], cap_pixels_per_frame=cap
    )
    found: list[tuple[int, int]] = []
    for width, height, frames in sizes:
        video = torch.empty((1, frames, 3, height, width), device="meta")
        size = processor.resize(
            video, processor.size, None, factor=28, temporal_factor=2, cap_pixels_per_frame=cap
        )
        resized = torch.empty((1, frames, 3, size.height, size.width), device="meta")
        patches, grid_t, grid_h, grid_w = processor.patchify(resized, 14, 2, 2)
        assert patches.shape[1] == grid_t * grid_h * grid_w
        found.append((patches.shape[1] // 4, grid_t))
    return found


def qwen_windows(grids: list[list[int]]) -> list[int]:
    """The largest window of each grid of patches, in patches."""
    encoder = SimpleNamespace(
        window_size=112, spatial_merge_size=2, patch_size=14, spatial_merge_unit=4
    )
    ends = [
        Qwen2_5_VisionTransformer.get_window_index_thw(encoder, *grid)[1].tolist() for grid in grids
    ]
    return [max(b - a for a, b in zip([0, *each], each, strict=False)) for each in ends]


def ultravox(seconds: list[float]) -> list[tuple[int, int, int]]:
    """Tokens, pieces, and the encoder's frames of the longest piece.

    Cutting into pieces is done by code that comes with the checkpoint; it is written out here.
    """
    extractor = WhisperFeatureExtractor(feature_size=128)
    stack = StackAudioFrames(STACK)
    found = []
    for length_s in seconds:
        samples = torch.zeros(max(320, round(length_s * RATE))).numpy()
        made = extractor(
            [samples],
            sampling_rate=RATE,
            padding="longest",
            pad_to_multiple_of=160,
            truncation=False,
            return_attention_mask=True,
        )
        num_frames = int(made["attention_mask"].sum())
        lengths = torch.tensor(
            [min(CONTEXT, num_frames - start) for start in range(0, num_frames, CONTEXT)]
        )
        frames = UltravoxWhisperEncoder._get_feat_extract_output_lengths(None, lengths).tolist()
        tokens = [stack(torch.empty((1, num, 4))).shape[1] for num in frames]
        found.append((sum(tokens), len(frames), max(frames)))
    return found


def weights() -> dict[str, int]:
    llama = LlamaConfig(
        vocab_size=64064,
        hidden_size=7168,
        intermediate_size=20480,
        num_hidden_layers=60,
        num_attention_heads=56,
        num_key_value_heads=8,
    )
    qwen = Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    )
    gemma = Gemma3TextConfig(
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        sliding_window=1024,
    )
    with torch.device("meta"):
        made = {
            "llama": LlamaForCausalLM(llama),
            "qwen": Qwen2ForCausalLM(qwen),
            "gemma": Gemma3ForCausalLM(gemma),
            "clip": CLIPVisionModel(CLIP),
            "vit": Qwen2_5_VisionTransformerPretrainedModel(QWEN.vision_config),
            "whisper": WhisperEncoder(WHISPER),
        }
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in made.items()}
    return counts | {"windows": gemma.layer_types.count("sliding_attention")}


def main() -> None:
    # What a frame is resized to is what is asked; there are no pixels to resize.
    BaseVideoProcessor.resize = lambda self, image, size, resample: size
    ask = json.load(sys.stdin)
    answer = {
        "llava_next": llava_next(ask["pictures"]),
        "llava": llava(ask["folder"], ask["pictures"]),
        "qwen_pictures": qwen_pictures(ask["pictures"], ask["bounds"]),
        "qwen_videos": qwen_videos(ask["videos"], ask["bounds"], cap=False),
        "qwen_default_videos": qwen_videos(ask["videos"], ask["frame_bounds"], cap=False),
        "qwen_capped_videos": qwen_videos(ask["videos"], ask["frame_bounds"], cap=True),
        "qwen_windows": qwen_windows(ask["grids"]),
        "ultravox": ultravox(ask["seconds"]),
        "weights": weights(),
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
