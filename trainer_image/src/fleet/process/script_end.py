"""How a script has ended, as its exit handlers want to know: Python does not tell them.

A script ends well by running out of statements, or by ``sys.exit`` with 0 or nothing. An uncaught
``SystemExit`` reaches no exception hook, so two things are kept: the frame that the main thread began with,
whose last instruction is a return only if no exception has ended it, and what ``sys.exit`` was last told.
What ``raise SystemExit(...)`` was told nobody knows, nor whether it meant well.
"""

import opcode
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["ScriptEnd"]

_UNKNOWN = object()


class ScriptEnd:
    """The end of this process's script, from :meth:`watch` on."""

    def __init__(self) -> None:
        self._main: FrameType | None = None
        self._status: Any = _UNKNOWN
        self._exit = sys.exit

    def watch(self) -> None:
        """Have the end be known."""
        self._main = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 (documented)
        while self._main is not None and self._main.f_back is not None:
            self._main = self._main.f_back
        self._exit, sys.exit = sys.exit, self._note_and_exit

    def undo(self) -> None:
        """Give a forked child the ``sys.exit`` of before."""
        if sys.exit == self._note_and_exit:
            sys.exit = self._exit

    def is_well(self) -> bool:
        """Whether the script is known to have ended well; asked for as the process exits."""
        return self._has_returned() or self._status is None or self._status == 0

    def has_chosen_failure(self) -> bool:
        """Whether `sys.exit` was told another status than 0, or a text."""
        return not self._has_returned() and self._status not in (_UNKNOWN, None, 0)

    def reason(self) -> str:
        """Return the text with which ``sys.exit`` has ended the script; empty where there is none."""
        if self._has_returned() or self._status is _UNKNOWN or isinstance(self._status, int | None):
            return ""
        return " ".join(str(self._status).split())

    def _has_returned(self) -> bool:
        if self._main is None or self._main.f_lasti < 0:
            return True  # not a script's process, of which nothing is known
        return opcode.opname[self._main.f_code.co_code[self._main.f_lasti]].startswith("RETURN_")

    def _note_and_exit(self, status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            self._status = status
        self._exit(status)
