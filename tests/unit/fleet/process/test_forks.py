"""What forked children keep of their parent's sockets: none that is told of."""

import os
import socket

from fleet.process.forks import own


def test_a_forked_child_closes_its_copies_of_what_is_owned_and_of_nothing_else():
    ours, other = socket.socketpair()
    with own(ours), other:
        if (child := os.fork()) == 0:
            os._exit((ours.fileno(), other.fileno() >= 0) != (-1, True))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ours.sendall(b"x")
        assert other.recv(1) == b"x"
