"""A picked prompt has the names that a gateway gives it."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt.prompt import Hashing
from hybrid_cache.hashing.block_hash import namespaced
from hybrid_cache.hashing.chains import ChainCache
from hybrid_cache.hashing.name_secrets import NameSecrets
from node.picked.prompt_names import LONG_TOKENS, names_of, owner_of
from prompts.fair_cache import FairCache

SECRETS = NameSecrets((b"\1" * 32, b""))


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=200),
    cache_salt=st.text(max_size=8),
    block_size=st.integers(1, 64),
)
def test_names_are_those_of_a_gateway(tokens: list[int], cache_salt: str, block_size: int) -> None:
    hashing = Hashing(block_size, SECRETS.model_salts("layout")[0], key=SECRETS.namespace_keys()[0])
    namespace = hashing.namespace(cache_salt)
    chain = ChainCache(FairCache(1 << 20)).chain(tokens, block_size, namespaced(hashing.salt, namespace))
    owner = owner_of(SECRETS, "layout", cache_salt)
    names = asyncio.run(names_of(tokens, block_size, owner.salt))
    assert (owner.salt, owner.namespace) == (namespaced(hashing.salt, namespace), namespace)
    assert (names.hashes, names.digest, names.num_tokens) == (b"".join(chain.hashes), chain.digest, len(tokens))


def test_long_prompts_have_the_same_names() -> None:
    tokens = [place % 1000 for place in range(LONG_TOKENS + 5)]
    names = asyncio.run(names_of(tokens, 16, b"salt"))
    chain = ChainCache(FairCache(1 << 20)).chain(tokens, 16, b"salt")
    assert (names.hashes, names.digest) == (b"".join(chain.hashes), chain.digest)
