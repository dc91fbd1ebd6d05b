"""Python imports this module before anything else, in every process that a test starts.

Importing torch creates a large number of objects, and by default the garbage collector scans all of them again and again.
That is a quarter of the time of a short script, and the tests start hundreds of scripts.
"""

import gc

gc.set_threshold(20_000, 20, 50)
