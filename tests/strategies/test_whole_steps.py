"""Parameters that are stepped whole, of which each rank has a part."""

from trainkit.strategies._whole_steps import senders


def testsenders() -> None:
    """Of the ranks with one part, the owner sends it if it has it; ranks without values send nothing."""
    first, second, none = ((0, 2), (0, 3)), ((2, 4), (0, 3)), ((4, 4), (0, 3))
    assert senders([first, second, none], 0) == senders([first, second, none], 2) == [0, 1]
    copies = [first, second, first, second]
    assert [senders(copies, owner) for owner in range(4)] == [[0, 1], [0, 1], [1, 2], [0, 3]]
    assert senders([none, none], 1) == []
    assert senders([()], 0) == [0]  # a scalar
