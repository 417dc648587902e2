"""The yardstick says where it cannot be used."""

import torch

from engine.torch.reference import TIE, first_tie


class Scripted(torch.nn.Module):
    """A model of three tokens that gives the logits it was made with, whatever it is asked."""

    def __init__(self, logits: list[list[float]]) -> None:
        super().__init__()
        self.logits = torch.tensor([logits])

    def forward(self, tokens: torch.Tensor) -> "Scripted":
        assert tokens.shape == self.logits.shape[:2]
        return self


def test_a_clear_winner_at_every_token_is_no_tie() -> None:
    assert first_tie(Scripted([[0.0, 1.0, 0.0], [1.0, 0.0, 0.5], [0.0, 0.0, 0.0]]), [7], [1, 0]) is None


def test_the_first_token_whose_rival_is_within_rounding_is_named() -> None:
    logits = [[9.0, 9.0, 9.0], [0.0, 1.0, 0.0], [1.0, 1.0 + TIE / 2, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    assert first_tie(Scripted(logits), [7, 7], [1, 1, 0]) == 1
