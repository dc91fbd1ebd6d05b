"""Imported by every Python that a test starts, before anything else: Python looks for a module of this name.

Importing torch creates a large number of objects, and by default the garbage collector looks through all of them again and
again: that is a quarter of the time of a short script, and the tests start hundreds.
"""

import gc

gc.set_threshold(20_000, 20, 50)
