from hybrid_cache.errors import IntegrityError
from node.kvcache.paced_check import PacedCheck


class Pool:
    """A pool whose check takes `seconds` on the clock."""

    def __init__(self, seconds: float) -> None:
        self.now, self.checks, self.wrong = 100.0, 0, False
        self._seconds = seconds

    def check_integrity(self) -> None:
        self.now += self._seconds
        self.checks += 1
        if self.wrong:
            raise IntegrityError("a page is in two places")


def test_a_fast_check_is_made_whenever_it_is_asked_for() -> None:
    pool = Pool(0.001)
    check = PacedCheck(lambda: pool.now)
    assert check.result(pool.check_integrity) == ""
    pool.wrong = True
    assert check.result(pool.check_integrity) == "a page is in two places"


def test_a_slow_one_takes_a_hundredth_of_the_time() -> None:
    pool = Pool(0.3)
    check = PacedCheck(lambda: pool.now)
    while pool.now < 400.0:
        check.result(pool.check_integrity)
        pool.now += 0.05
    assert 9 <= pool.checks <= 11
