"""What is printed about where each block goes, for `config.print_log`."""

from fleet.transpiler.layout import Layout

__all__ = ["print_layout"]


def print_layout(layout: Layout) -> None:
    """Print one line per block, and the share of each server, as the original does."""
    for block in layout.blocks:
        shape = list(block.shape)
        print(f"{block.name} {shape} elements {block.begin} to {block.end} on {block.endpoint}")
    for endpoint in layout.endpoints:
        held = layout.on(endpoint)
        elements = sum(block.end - block.begin for block in held)
        print(f"{endpoint} holds {len(held)} blocks, {elements} elements", flush=True)
