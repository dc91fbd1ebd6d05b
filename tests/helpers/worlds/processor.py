"""Ask py-cpuinfo once, in the server of `worlds.py`, instead of twice for each optimizer that DeepSpeed makes on the CPU.

Each question starts Python three times, which takes half a second of CPU.
"""

import cpuinfo

_INFO = cpuinfo.get_cpu_info()
cpuinfo.get_cpu_info = lambda: dict(_INFO)
