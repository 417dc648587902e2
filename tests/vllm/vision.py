"""A tiny model that sees, with the files of its processor: Idefics 3, which vLLM serves where there is no torchvision."""

import base64
import io
import json
from pathlib import Path
from typing import Any, Final

from engine.byte_tokenizer import CHAT_TEMPLATE, PAD, VOCAB_SIZE, save_byte_tokenizer
from engine.model.tiny import CONTEXT_TOKENS, WEIGHT_SCALE
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
    import torch
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
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.Idefics3ForConditionalGeneration(config).to(torch.float32)
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(WEIGHT_SCALE)
    model.save_pretrained(path)
    save_byte_tokenizer(path, CONTEXT_TOKENS)
    _name_tokens(path)
    edge = {"longest_edge": SIDE}
    pictures = transformers.Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    transformers.Idefics3Processor(
        image_processor=pictures,
        tokenizer=transformers.AutoTokenizer.from_pretrained(path),
        image_seq_len=IMAGE_TOKENS,
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    return path


def _name_tokens(path: Path) -> None:
    file = path / "tokenizer.json"
    told: dict[str, Any] = json.loads(file.read_text())
    words = {index: word for word, index in told["model"]["vocab"].items()}
    words |= {index: token for token, index in NAMED.items()}
    told["model"]["vocab"] = {word: index for index, word in words.items()}
    special = dict(told["added_tokens"][-1])
    told["added_tokens"] += [special | {"id": index, "content": token} for token, index in NAMED.items()]
    file.write_text(json.dumps(told))


def picture(seed: int) -> str:
    """An image of large random squares, as a data URL."""
    import numpy as np
    from PIL import Image

    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(squares).resize((200, 150), Image.Resampling.NEAREST).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
