import pytest
from safetensors import SafetensorError

from engine.agent.identity import model_identity
from engine.byte_tokenizer import VOCAB_SIZE, byte_vocabulary
from engine.errors import ModelError
from engine.torch import tiny
from engine.torch.tiny import build_model
from prompts.tokens.tokenizer import TextTokenizer


def build(arch, path, **options):
    return build_model(arch, path, report=lambda _: None, **options)


def test_it_says_what_it_made(tmp_path):
    said = []
    built = build_model("lfm2", tmp_path / "m", report=said.append)
    assert said == [f"lfm2: 2.4M parameters, 4 layers, vocabulary 512, context 32768 tokens -> {tmp_path / 'm'}"]
    assert built.num_layers == 4


def test_seed_decides_the_weights(tmp_path):
    names = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        names[name] = model_identity(build("llama", tmp_path / name, seed=seed).path)
    assert names["a"] == names["b"] != names["c"]


def test_the_same_model_is_built_again_anything_else_is_left_alone(tmp_path):
    build("llama", tmp_path / "m")
    build("llama", tmp_path / "m")
    for other in ({"arch": "lfm2"}, {"arch": "llama", "seed": 5}):
        with pytest.raises(ModelError, match="holds something else"):
            build(other.pop("arch"), tmp_path / "m", **other)
    (tmp_path / "m" / "prfaas_tiny_model.json").unlink()  # as in a directory of real weights
    with pytest.raises(ModelError, match="holds something else"):
        build("llama", tmp_path / "m")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("three years of work")
    with pytest.raises(ModelError, match="holds something else"):
        build("llama", tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]
    assert build("llama", tmp_path / "other", overwrite=True).path == tmp_path / "other"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_what_was_begun_and_not_finished_is_no_model_and_in_nobodys_way(tmp_path, error):
    def fail(*_):
        raise error

    with pytest.raises(ModelError, match="No space left"):
        build("llama", tmp_path / "m", save_tokenizer=fail)
    assert [path.name for path in tmp_path.rglob("*")] == ["m"]
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / tiny.MARKER_FILE).write_text('{"arch"')
    with pytest.raises(ModelError, match="holds something else"):
        build("llama", tmp_path / "half")
    names = ["config.json", "model.safetensors", tiny.MARKER_FILE, "tokenizer.json"]
    assert tiny.moved_in_order(names) == [tiny.MARKER_FILE, "model.safetensors", "tokenizer.json", "config.json"]


def test_destination_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="not a directory"):
        build("llama", tmp_path / "file")


def test_unknown_architecture_names_the_known_ones(tmp_path):
    with pytest.raises(ModelError, match=r"'gpt5'.*kimi_linear"):
        build("gpt5", tmp_path)


def test_vocabulary_covers_every_byte():
    vocabulary = byte_vocabulary()
    assert len(vocabulary) == VOCAB_SIZE
    assert sorted(vocabulary.values()) == list(range(VOCAB_SIZE))


def test_tokenizer_of_a_built_model_equals_that_of_transformers(tmp_path):
    from transformers import AutoTokenizer

    path = build("llama", tmp_path / "m").path
    ours, theirs = TextTokenizer.load(path), AutoTokenizer.from_pretrained(path)
    text = "Grüße, 世界! </s> \n\ttabs"
    assert ours.encode(text).tolist() == theirs.encode(text)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    tokens = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.encode_rendered(ours.render(messages)).tolist() == tokens
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.decode(ours.encode("日本語 🙂").tolist()) == "日本語 🙂"
