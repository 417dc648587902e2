"""Who gets a place for a handshake, and who loses one."""

from node.engine.handshakes import HandshakePlaces


def filled(in_all: int, of_network: int, *networks: str) -> HandshakePlaces[str]:
    places: HandshakePlaces[str] = HandshakePlaces(in_all, of_network)
    for number, network in enumerate(networks):
        assert places.enter(f"{network}-{number}", network, is_known=network.startswith("known")) is None
    return places


def test_a_full_network_loses_its_own_oldest() -> None:
    places = filled(8, 2, "a", "b", "a")
    assert places.enter("new", "a", is_known=False) == "a-0"
    assert places.enter("newer", "a", is_known=False) == "a-2"
    assert len(places) == 3


def test_where_all_are_taken_the_oldest_stranger_loses() -> None:
    places = filled(3, 2, "known", "a", "b")
    assert places.enter("c", "c", is_known=False) == "a-1"
    assert places.enter("known-new", "known", is_known=True) == "b-2"
    assert len(places) == 3


def test_a_stranger_never_takes_the_place_of_a_known_caller() -> None:
    places = filled(2, 2, "known", "known2")
    assert places.enter("stranger", "a", is_known=False) == "stranger"
    assert places.enter("known3-new", "known3", is_known=True) == "known-0"
    assert len(places) == 2


def test_a_place_is_given_back_once() -> None:
    places = filled(2, 1, "a", "b")
    places.leave("a-0")
    places.leave("a-0")
    places.leave("nobody")
    assert places.enter("new", "a", is_known=False) is None
    assert len(places) == 2
