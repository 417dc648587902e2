"""Who gets a place for a handshake, and who loses one."""

from transport.path.handshakes import DAWDLES_S, KNOWN_S, HandshakePlaces, KnownSites


def filled(in_all: int, of_network: int, *networks: str) -> HandshakePlaces[str]:
    """One after the other from time 0 on, all in the same instant."""
    places: HandshakePlaces[str] = HandshakePlaces(in_all, of_network)
    for number, network in enumerate(networks):
        assert places.enter(f"{network}-{number}", network, 0.0, is_known=network.startswith("known")) is None
    return places


def test_a_network_with_all_its_places_loses_one_that_dawdles_and_no_other() -> None:
    places = filled(8, 2, "a", "b", "a")
    assert places.enter("new", "a", DAWDLES_S / 2, is_known=False) == "new"
    assert places.enter("new", "a", DAWDLES_S, is_known=False) == "a-0"
    assert places.enter("newer", "a", DAWDLES_S, is_known=False) == "a-2"
    assert places.enter("newest", "a", DAWDLES_S, is_known=False) == "newest"
    assert len(places) == 3


def test_where_all_are_taken_the_oldest_stranger_loses() -> None:
    places = filled(3, 2, "known", "a", "b")
    assert places.enter("c", "c", 0.0, is_known=False) == "a-1"
    assert places.enter("known-new", "known", 0.0, is_known=True) == "b-2"
    assert len(places) == 3


def test_a_known_caller_has_as_many_places_as_there_are() -> None:
    places = filled(5, 1, "known", "known", "known", "a")
    assert places.enter("more", "known", 0.0, is_known=True) is None
    assert places.enter("most", "known", 0.0, is_known=True) == "a-3"
    assert places.enter("too many", "known", 0.0, is_known=True) == "too many"


def test_a_stranger_never_takes_the_place_of_a_known_caller() -> None:
    places = filled(2, 2, "known", "known2")
    assert places.enter("stranger", "a", 10.0, is_known=False) == "stranger"
    assert places.enter("stranger", "known", 10.0, is_known=False) == "stranger"
    assert len(places) == 2


def test_strangers_behind_a_known_address_keep_no_other_known_caller_waiting() -> None:
    places = filled(4, 4, "known", "known", "known", "known")
    assert places.enter("other", "known2", 0.0, is_known=True) == "known-0"
    assert places.enter("other's next", "known2", 0.0, is_known=True) == "known-1"
    assert places.enter("other's last", "known2", DAWDLES_S / 2, is_known=True) == "other's last"
    assert places.enter("their gateway", "known", DAWDLES_S / 2, is_known=True) == "their gateway"
    assert places.enter("their gateway", "known", DAWDLES_S, is_known=True) == "known-2"
    assert len(places) == 4


def test_a_network_without_a_place_takes_one_of_a_network_with_several() -> None:
    places = filled(3, 1, "known", "known", "known2")
    assert places.enter("other", "known3", 0.0, is_known=True) == "known-0"
    assert places.enter("one more", "known4", 0.0, is_known=True) == "one more"
    assert places.enter("one more", "known3", DAWDLES_S, is_known=True) == "other"


def test_a_place_is_given_back_once() -> None:
    places = filled(2, 1, "a", "b")
    places.leave("a-0")
    places.leave("a-0")
    places.leave("nobody")
    assert places.enter("new", "a", 0.0, is_known=False) is None
    assert len(places) == 2


def test_sites_are_known_for_a_while_and_the_longest_unseen_are_forgotten_first() -> None:
    sites = KnownSites(most=2)
    assert not sites.is_known("a", 0.0)
    for site, now in (("a", 0.0), ("b", 1.0), ("a", 2.0), ("c", 3.0)):
        sites.remember(site, now)
    assert [sites.is_known(site, 4.0) for site in "abc"] == [True, False, True]
    assert sites.is_known("a", 2.0 + KNOWN_S - 0.1)
    assert not sites.is_known("a", 2.0 + KNOWN_S)
