"""Tiny models that see, with the files of their processors, which vLLM serves where there is no torchvision.

Idefics 3 counts positions as texts do. PaddleOCR-VL counts them as Qwen2-VL does (M-RoPE): an image is a plane of positions, and
what comes after it begins where the longer of its edges ends.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any, Final

from engine.byte_tokenizer import CHAT_TEMPLATE, PAD, VOCAB_SIZE, save_byte_tokenizer
from engine.torch.tiny import CONTEXT_TOKENS, WEIGHT_SCALE
from tests.vllm.cases import build

SIDE: Final = 112  # pixels that the model sees, whatever an image has
PATCH: Final = 14
SCALE: Final = 2  # patches that become one, in each direction
IMAGE_TOKENS: Final = (SIDE // PATCH // SCALE) ** 2
AROUND: Final = 3  # the image's frame, in tokens
IMAGE: Final = "<image>"
# They take the place of the vocabulary's last syllables.
NAMED: Final = {
    token: VOCAB_SIZE - 1 - index
    for index, token in enumerate((IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"))
}
# An image stands where its part stood.
PARTS: Final = (
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
)
TEMPLATE: Final = CHAT_TEMPLATE.replace("{{ message['content'] }}", PARTS)


def build_vision(folder: Path, seed: int = 0) -> Path:
    """Written once. Weights are scaled as the text model's are, or every image would look the same to it."""
    import transformers

    path = folder / "idefics3"
    if path.exists():
        return path
    text = transformers.AutoConfig.from_pretrained(build("llama", folder))
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Idefics3Config(
        vision_config={**vision, "image_size": SIDE, "patch_size": PATCH},
        text_config=text.to_dict(),
        image_token_id=NAMED[IMAGE],
        scale_factor=SCALE,
        pad_token_id=PAD,
    )
    _save(transformers.Idefics3ForConditionalGeneration, config, path, seed)
    edge = {"longest_edge": SIDE}
    pictures = transformers.Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    transformers.Idefics3Processor(
        image_processor=pictures,
        tokenizer=transformers.AutoTokenizer.from_pretrained(path),
        image_seq_len=IMAGE_TOKENS,
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    return path


def build_planes(folder: Path, seed: int = 0) -> Path:
    """As `build_vision`; how many tokens an image has depends on its size."""
    import transformers

    path = folder / "paddleocr_vl"
    if path.exists():
        return path
    text = transformers.AutoConfig.from_pretrained(build("llama", folder)).to_dict()
    kept = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings", "hidden_size")
    sizes = (
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "tie_word_embeddings",
    )
    head = text["hidden_size"] // text["num_attention_heads"]
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16],
    }
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.PaddleOCRVLConfig(
        vision_config={**vision, "image_size": SIDE, "patch_size": PATCH, "spatial_merge_size": SCALE},
        text_config={name: text[name] for name in (*kept, *sizes)} | {"head_dim": head, "rope_parameters": rope},
        image_token_id=NAMED[IMAGE],
        video_token_id=NAMED["<end_of_utterance>"],
        vision_start_token_id=NAMED["<fake_token_around_image>"],
        vision_end_token_id=NAMED["<global-img>"],
        tie_word_embeddings=False,
    )
    _save(transformers.PaddleOCRVLForConditionalGeneration, config, path, seed)
    pictures = transformers.PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": SIDE * SIDE // 2, "longest_edge": SIDE * SIDE}, patch_size=PATCH, merge_size=SCALE
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, extra_special_tokens={"image_token": IMAGE})
    transformers.PaddleOCRVLProcessor(pictures, tokenizer, chat_template=TEMPLATE).save_pretrained(path)
    return path


def _save(kind: Any, config: Any, path: Path, seed: int) -> None:
    import torch

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = kind(config).to(torch.float32)
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(WEIGHT_SCALE)
    model.save_pretrained(path)
    save_byte_tokenizer(path, CONTEXT_TOKENS)
    _name_tokens(path)


def _name_tokens(path: Path) -> None:
    file = path / "tokenizer.json"
    told: dict[str, Any] = json.loads(file.read_text())
    words = {index: word for word, index in told["model"]["vocab"].items()}
    words |= {index: token for token, index in NAMED.items()}
    told["model"]["vocab"] = {word: index for index, word in words.items()}
    special = dict(told["added_tokens"][-1])
    told["added_tokens"] += [special | {"id": index, "content": token} for token, index in NAMED.items()]
    file.write_text(json.dumps(told))


def picture(seed: int, size: tuple[int, int] = (200, 150)) -> str:
    """An image of large random squares, as a data URL."""
    import numpy as np
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(squares).resize(size, Image.Resampling.NEAREST).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
