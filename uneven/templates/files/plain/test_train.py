"""Does the training script work? A few steps on the CPU. Start it by: make test"""

import unittest

import torch

import train


class TestTraining(unittest.TestCase):
    def test_the_model_gives_a_score_to_every_class(self) -> None:
        assert train.make_model()(torch.zeros(3, 2)).shape == (3, 2)

    def test_it_learns_within_a_few_steps(self) -> None:
        state = train.train(max_steps=60, devices="cpu", progress="off")
        assert state.history[-1]["accuracy"] > 0.7  # by chance it would be 0.5


if __name__ == "__main__":
    unittest.main()
