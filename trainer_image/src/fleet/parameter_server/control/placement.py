"""A placement as a message of the control service."""

from collections.abc import Mapping

from fleet.parameter_server.control.proto import control_pb2
from fleet.plan.placement import Part, Placement

__all__ = ["pack_placement", "read_placement"]


def pack_placement(placement: Placement, checksums: Mapping[int, int]) -> control_pb2.Placement:
    """Return what a server tells of its blocks.

    Parameters
    ----------
    placement : Placement
    checksums : mapping of int to int
        CRC-32 of the values that the server's process has built, by block.
    """
    parts = [
        control_pb2.Part(
            block=part.block,
            name=part.name,
            index=part.index,
            param=part.param,
            dtype=part.dtype,
            begin=part.begin,
            shape=part.shape,
            checksum=checksums[part.block],
        )
        for part in placement.parts
    ]
    return control_pb2.Placement(version=placement.version, parts=parts)


def read_placement(message: control_pb2.Placement) -> Placement:
    """Return what a server has told."""
    parts = (
        Part(part.block, part.name, part.index, part.param, part.dtype, part.begin, tuple(part.shape))
        for part in message.parts
    )
    return Placement(tuple(parts), message.version)
