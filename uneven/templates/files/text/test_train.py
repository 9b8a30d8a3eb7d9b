"""Does the training script work? A few steps on the CPU. Start it by: make test"""

import math
import unittest

import train


class TestTraining(unittest.TestCase):
    def test_the_model_continues_a_text(self) -> None:
        text = train.write_on(train.CharGPT().eval(), train.TEXT[:100], characters=3)
        assert (text[:100], len(text)) == (train.TEXT[:100], 103)

    def test_it_learns_within_a_few_steps(self) -> None:
        state = train.train(max_steps=10, devices="cpu", progress="off")
        assert state.history[-1]["loss"] < math.log(len(train.CHARS)) - 0.5  # the loss of a guess


if __name__ == "__main__":
    unittest.main()
