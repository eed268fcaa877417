"""The log of where each block goes, for `config.print_log`."""

import logging

from fleet.transpiler.layout import Layout

__all__ = ["log_layout"]

_log = logging.getLogger(__name__)


def log_layout(layout: Layout) -> None:
    """Log one line per block, and the share of each server."""
    for block, server in zip(layout.blocks, layout.servers, strict=True):
        _log.info(
            "%s %s elements %d to %d on %s", block.name, list(block.shape), block.begin, block.end, server
        )
    for endpoint in layout.endpoints:
        held = layout.on(endpoint)
        _log.info("%s holds %d blocks, %d elements", endpoint, len(held), sum(b.end - b.begin for b in held))
