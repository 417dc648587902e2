"""A cache that grows does not make the event loop stand still for a look at all of it."""

import subprocess
import sys

GROW = """
import gc
from node.process.interpreter import favour_the_loop

class Block:
    def __init__(self, parent):
        self.parent = parent

favour_the_loop()
before = gc.get_stats()
blocks = [None]
for _ in range(300_000):
    blocks.append(Block(blocks[-1]))
print(*(now["collections"] - then["collections"] for now, then in zip(gc.get_stats(), before)))
"""


def test_objects_that_stay_are_looked_at_once_or_twice() -> None:
    found = subprocess.run([sys.executable, "-c", GROW], check=True, capture_output=True, text=True, timeout=60.0)
    youngest, young, old = map(int, found.stdout.split())
    assert young >= youngest // 4 > 0, "each looks at a few of the youngest collections' objects"
    assert old == 0, "it would look at every block"
