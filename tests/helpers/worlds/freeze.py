"""The last module that the server of `worlds.py` imports: its objects are not looked at by any collection in a forked process.

DeepSpeed calls `gc.collect` when it starts ZeRO-3, which takes 0.7 s with the objects of all imported modules.
"""

import gc

gc.collect()
gc.freeze()
