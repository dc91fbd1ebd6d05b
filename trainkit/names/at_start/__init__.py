"""A folder for `PYTHONPATH`: its `sitecustomize.py` opens the doors of the process that started this one."""
