"""Prompts of a node's own against a scripted agent, and what is left alone."""

import pytest

from hybrid_cache.hashing.block_hash import MEDIUM, Inset, model_salt, namespaced
from tests.engine.vllm.builders import BLOCK, tables_for
from tests.engine.vllm.scripted import LANDING, LAYOUT, LEG, N, Request, World, medium


def test_a_cached_prefix_that_cannot_be_loaded_is_no_landing_that_failed(world):
    request = world.arrive(Request())
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.grant(3 * BLOCK, cached=2 * BLOCK)
    world.side.after_alloc(request, ((), ()), world.side.num_new_matched_tokens(request, 0))
    world.side.loads_ended({"r"}, {"r"})
    assert world.side.request_finished(request) is None
    assert world.side.take_counts().fallbacks == {"load_failed": 1}


def test_an_agent_that_says_nothing_is_not_waited_for(world):
    request = world.arrive(Request())
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.now = 5.0
    assert world.side.num_new_matched_tokens(request, 0) is None
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert world.side.take_counts().fallbacks == {"timeout": 1}


def test_a_cached_prefix_is_loaded_and_the_rest_saved(world):
    request = world.arrive(Request())
    assert world.side.num_new_matched_tokens(request, 0) is None
    world.grant(3 * BLOCK, cached=2 * BLOCK)
    assert world.side.num_new_matched_tokens(request, 0) == 2 * BLOCK
    world.side.after_alloc(request, tables_for(LAYOUT, 2 * BLOCK), 2 * BLOCK)
    world.idle()
    world.side.loads_ended({"r"}, set())
    request.num_computed_tokens = 2 * BLOCK
    step = world.schedule(request, N - 2 * BLOCK)
    assert (step.saves[0].start, step.saves[0].stop) == (2 * BLOCK, 3 * BLOCK)
    assert world.side.take_counts().cached_tokens == 2 * BLOCK


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lora_request": object()}, "lora"),
        ({"mm_features": [medium("a-clients-uuid")]}, "multimodal"),
        ({"mm_features": [medium(f"{MEDIUM}1", modality="video")]}, "multimodal"),
        ({"mm_features": [medium(f"{MEDIUM}1"), medium("2", start=9)]}, "multimodal"),
        ({"cache_salt": "x"}, "cache_salt"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"skip_reading_prefix_cache": True}, "prompt_logprobs"),
    ],
)
def test_kvcache_of_more_than_tokens_is_not_shared(world, fields, reason):
    world.arrive(Request("local", **fields))
    assert not world.agent.asked
    request = world.arrive(Request("leg", params=LEG, **fields))
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert world.side.request_finished(request) == {"delivered": False, "reason": reason}
    request = world.arrive(Request("decode", params=LANDING, **fields))
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert world.side.request_finished(request) == {"recomputed": True, "reason": reason}


@pytest.mark.parametrize("params", [None, LEG, LANDING])
def test_what_a_prompt_has_beside_tokens_is_part_of_what_the_agent_is_asked_for(world, params):
    images = [medium(f"{MEDIUM}a"), medium(f"{MEDIUM}b", start=BLOCK)]
    world.side.num_new_matched_tokens(world.arrive(Request(params=params, mm_features=images)), 0)
    assert world.agent.insets == [(Inset(1, f"{MEDIUM}a"), Inset(BLOCK, f"{MEDIUM}b"))]


def test_an_image_at_the_very_end_is_left_to_the_decode_node(world):
    last = medium(f"{MEDIUM}a", start=N - 3)
    request = world.arrive(Request("leg", params=LEG, mm_features=[medium(f"{MEDIUM}b"), last]))
    assert (request.num_prompt_tokens, request.mm_features) == (1, [])
    assert world.side.request_finished(request) == {"delivered": False, "reason": "media_at_end"}
    request = world.arrive(Request("before", params=LEG, mm_features=[medium(f"{MEDIUM}a", start=N - 4)]))
    assert (request.num_prompt_tokens, len(request.mm_features)) == (N - 1, 1)


def test_a_local_prompt_that_is_cached_completely_is_told(world):
    request = world.arrive(Request())
    world.side.num_new_matched_tokens(request, 0)
    world.grant(3 * BLOCK, cached=3 * BLOCK)
    assert world.side.num_new_matched_tokens(request, 0) == 3 * BLOCK
    world.side.after_alloc(request, tables_for(LAYOUT, 3 * BLOCK), 3 * BLOCK)
    world.idle()
    world.side.loads_ended({"r"}, set())
    assert world.agent.completed == [1]
    assert world.agent.ended == [(1, False, "")]


def test_the_local_tier_can_be_switched_off():
    world = World(local_tier=False)
    request = world.arrive(Request())
    assert world.side.num_new_matched_tokens(request, 0) == 0
    assert not world.agent.asked


def test_parameters_that_are_none_are_refused_or_counted(world):
    request = world.arrive(Request("leg", params={"do_remote_decode": True}))
    assert world.side.request_finished(request) == {"delivered": False, "reason": "bad_request"}
    world.arrive(Request("decode", params={"do_remote_prefill": True}))
    assert world.side.take_counts().fallbacks == {"bad_request": 1}


def test_load_is_reported(world):
    request = world.arrive(Request())
    world.idle()
    assert world.agent.loads[-1] == (0, 1, N)
    world.side.request_finished(request)
    world.idle()
    assert world.agent.loads[-1] == (0, 0, 0)


@pytest.mark.parametrize(
    "params",
    [
        "x",
        7,
        [1],
        {"salt": 3},
        {"salt": "zz"},
        {"timeout_s": 1 << 70},
        {"ticket": {}},
        {"do_remote_decode": "\ud800"},
        {1: 2},
    ],
    ids=str,
)
def test_parameters_that_strangers_made_up_raise_nothing_into_vllm(world, params):
    """Whatever is raised in a step ends the server for everybody."""
    request = world.arrive(Request("made up", params=params))
    world.side.num_new_matched_tokens(request, 0)
    world.side.build_step({}, lambda _: ())
    world.side.request_finished(request)


def test_parameters_without_end_raise_nothing_either(world):
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"ticket": deep}
    world.arrive(Request("deep", params=deep))
    assert world.side.take_counts().fallbacks == {"bad_request": 1}


def test_a_namespace_that_blocks_are_named_by_is_no_obstacle(world):
    namespace = "prfaas-acme"
    salt = namespaced(model_salt(LAYOUT.model.fingerprint), namespace).hex()
    request = world.arrive(Request("leg", params=LEG | {"salt": salt}, cache_salt=namespace))
    assert world.agent.asked
    assert world.side.num_new_matched_tokens(request, 0) is None  # it waits for the agent
    forged = world.arrive(Request("forged", params=LEG | {"salt": salt}, cache_salt="prfaas-other"))
    assert world.side.request_finished(forged) == {"delivered": False, "reason": "cache_salt"}


def test_a_namespace_by_any_of_the_agents_secrets_is_no_obstacle_and_one_by_none_is(world):
    salts = world.agent.block_salts = (b"new" * 10, b"old" * 10)
    for number, salt in enumerate(salts):
        named = namespaced(salt, "prfaas-acme").hex()
        leg = world.arrive(Request(f"leg{number}", params=LEG | {"salt": named}, cache_salt="prfaas-acme"))
        assert world.side.num_new_matched_tokens(leg, 0) is None
    unkeyed = namespaced(model_salt(LAYOUT.model.fingerprint), "prfaas-acme").hex()
    stale = world.arrive(Request("stale", params=LEG | {"salt": unkeyed}, cache_salt="prfaas-acme"))
    assert world.side.request_finished(stale) == {"delivered": False, "reason": "cache_salt"}
