from transport.send.sieve import Sieve


def sieve_of(*keys: str) -> Sieve[str]:
    sieve: Sieve[str] = Sieve()
    for key in keys:
        sieve.touch(key)
    return sieve


def test_the_oldest_unused_goes_first() -> None:
    sieve = sieve_of("a", "b", "c")
    assert [sieve.evict(), sieve.evict(), sieve.evict(), sieve.evict()] == ["a", "b", "c", None]


def test_what_is_used_is_spared_once() -> None:
    sieve = sieve_of("a", "b", "c", "a")
    assert sieve.evict() == "b"
    assert sieve.evict() == "c"
    assert sieve.evict() == "a"


def test_the_hand_goes_on_where_it_was() -> None:
    sieve = sieve_of("a", "b", "c", "d", "a")
    assert sieve.evict() == "b"
    sieve.touch("e")
    assert sieve.evict() == "c"
    sieve.remove("d")
    assert sieve.evict() == "e"
    assert len(sieve) == 1


def test_busy_ones_stay() -> None:
    sieve = sieve_of("a", "b")
    assert sieve.evict(lambda key: key != "a") == "b"
    assert sieve.evict(lambda key: False) is None
    assert len(sieve) == 1
