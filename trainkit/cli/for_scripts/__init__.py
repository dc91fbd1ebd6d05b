"""`TrainkitCLI`: arguments, configuration files and environment variables for the user's module, by jsonargparse.

`trainkit.cli` loads it on first use, so its modules may import jsonargparse at the top.
"""

from __future__ import annotations

from importlib.util import find_spec

from trainkit.errors import missing_package

__all__: list[str] = []

# docstring_parser and typeshed_client belong to jsonargparse's extra `signatures`: without them arguments have no help or type
if not all(map(find_spec, ("jsonargparse", "docstring_parser", "typeshed_client"))):
    raise missing_package("jsonargparse[signatures]", "cli", "TrainkitCLI")
