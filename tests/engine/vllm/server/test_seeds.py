"""Generators of requests with a seed, set aside while a sample is taken that is not used."""

from types import SimpleNamespace

from engine.vllm.server.seeds import with_seeds_back, without_unread_seeds


def test_a_seed_is_not_used_for_a_token_that_is_not_read() -> None:
    batch = SimpleNamespace(generators={0: "first", 2: "third"})
    runner = SimpleNamespace(input_batch=batch, discard_request_mask=SimpleNamespace(np=[True, True, False]))
    sample = without_unread_seeds(lambda runner: dict(runner.input_batch.generators))
    keep_books = with_seeds_back(lambda runner: dict(runner.input_batch.generators))
    assert sample(runner) == keep_books(runner) == {2: "third"}
    assert batch.generators == {0: "first", 2: "third"}
