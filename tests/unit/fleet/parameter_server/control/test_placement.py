"""What a server says that it holds is what a trainer hears."""

from fleet.parameter_server.control.placement import pack_placement, read_placement
from fleet.parameter_server.control.proto import control_pb2
from fleet.plan import Part, Placement


def test_a_placement_is_read_as_it_was_told():
    parts = (
        Part(3, "w.block1", 1, "w", "float32", 20000, (200, 100)),
        Part(0, "scale", 0, "scale", "float64", 0, ()),
    )
    placement = Placement(parts, 7)
    message = pack_placement(placement, {0: 1, 3: 0xFFFFFFFF})
    heard = control_pb2.Placement.FromString(message.SerializeToString())
    assert read_placement(heard) == placement
    assert [part.checksum for part in heard.parts] == [0xFFFFFFFF, 1]
