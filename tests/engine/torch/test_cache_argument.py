import pytest

from engine.torch.cache_argument import cache_argument


class Older:
    def forward(self, input_ids, past_key_values=None): ...


class Newer:
    def forward(self, input_ids, cache=None, **kwargs): ...


class Passing(Newer):
    def forward(self, input_ids, **kwargs): ...


class Kept(Newer):
    def forward(self, input_ids, past_key_values=None): ...


class Silent:
    def forward(self, *args, **kwargs): ...


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (Older, "past_key_values"),
        (Newer, "cache"),
        (Passing, "cache"),
        (Kept, "past_key_values"),
        (Silent, "past_key_values"),
    ],
)
def test_the_nearest_class_that_names_its_cache_decides(module, name):
    assert cache_argument(module()) == name
