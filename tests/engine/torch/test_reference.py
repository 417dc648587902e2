"""The yardstick says where it cannot be used."""

import math
from types import SimpleNamespace

import pytest
import torch

from engine.torch.reference import TIE, closest_routing, first_tie


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


class Router(torch.nn.Module):
    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scores, torch.topk(scores, 2, dim=-1).indices


class Routed(torch.nn.Module):
    """A model of one router over four experts, two for each token."""

    def __init__(self, scores: list[list[float]], num_experts: int = 4) -> None:
        super().__init__()
        self.router, self.scores = Router(), torch.tensor(scores)
        self.config = SimpleNamespace(num_experts=num_experts, num_experts_per_tok=2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.router(self.scores)
        return tokens


def test_the_closest_choice_between_the_last_expert_and_the_next_is_found() -> None:
    model = Routed([[4.0, 3.0, 1.0, 0.0], [0.0, 2.5, 3.0, 2.0], [1.0, 1.0, 0.0, 0.0]])
    assert closest_routing(model, [7, 7, 7]) == pytest.approx(0.5)  # equal first and second experts are no choice


def test_a_model_without_experts_chooses_none() -> None:
    assert closest_routing(Routed([[1.0, 1.0, 1.0, 1.0]], num_experts=0), [7]) == math.inf
