"""The pole on a cart of Barto, Sutton and Anderson (1983): four numbers, two actions, a reward of 1 per step."""

import math
import random


class CartPole:
    def __init__(self, seed: int = 0):
        self.random = random.Random(seed)

    def reset(self):
        self.state = [self.random.uniform(-0.05, 0.05) for _ in range(4)]
        self.steps = 0
        return list(self.state)

    def step(self, action):
        x, speed, angle, turn = self.state
        force = 10.0 if action == 1 else -10.0
        sin, cos = math.sin(angle), math.cos(angle)
        push = (force + 0.05 * turn**2 * sin) / 1.1
        angular = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        linear = push - 0.05 * angular * cos / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * linear, angle + 0.02 * turn, turn + 0.02 * angular]
        self.steps += 1
        done = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.2095 or self.steps >= 200
        return list(self.state), 1.0, done
