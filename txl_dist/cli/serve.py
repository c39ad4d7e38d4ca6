"""`txl serve`: check its flags before torch is imported, then start the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from txl_dist.artifacts import TRAINED, require
from txl_dist.cli.parsing import announce, local_source
from txl_dist.config.registry import load_plugins
from txl_dist.inference.options import InferencePrecision
from txl_dist.io.hub import address_of
from txl_dist.serve.listening import listen, require_packages
from txl_dist.serve.options import Serving


def serve(
    source: Positional[Path],
    /,
    serving: Annotated[Serving, arg(name="")],
    device: str = "cpu",
    precision: InferencePrecision = "stored",
    plugins: tuple[str, ...] = (),
) -> None:
    """Serve a bundle, a run or a checkpoint over HTTP like OpenAI's completions, with stored memories.

    Args:
        source: Bundle, hf://OWNER/NAME, run directory (its newest whole checkpoint) or checkpoint folder.
        serving: Settings of the server.
        device: Device of the model: cpu, cuda or, with several GPUs, cuda:1.
        precision: Number type of the computation. stored: that of the bundle's weights (fp32 for a run and for int8).
        plugins: Python modules to import first, which runs their code.
    """
    load_plugins(plugins)
    address = address_of(source)
    name = serving.name or (address.name if address else source.resolve().name)
    source = local_source(source)
    kind = require(source, *TRAINED)
    serving.check()
    serving.key()
    require_packages()
    listening = listen(serving)
    announce(f"serving {source}, {kind.value}")
    from txl_dist.console.logging import start_logging
    from txl_dist.convert.export import load
    from txl_dist.serve.server import run_server

    start_logging()
    run_server(load(source, device=device, precision=precision), serving, listening, name=name)
