"""Role makers, which derive a replica's role in its job from the environment or from arguments.

A role maker turns a mapping, by default the environment of this process, into a frozen `Role`, or raises a
`RoleError` that names the variable, its value and the expected one. ``Role.WORKER`` and ``Role.SERVER`` are
the kinds, as in Paddle.
"""

from fleet.role_maker.mpi import MPISymetricRoleMaker, MPISymmetricRoleMaker
from fleet.role_maker.paddle_cloud import PaddleCloudRoleMaker
from fleet.role_maker.role import File, JobIdentity, Role, RoleKind, RoleMaker, share_of_files
from fleet.role_maker.user_defined import UserDefinedCollectiveRoleMaker, UserDefinedRoleMaker

__all__ = [
    "File",
    "JobIdentity",
    "MPISymetricRoleMaker",
    "MPISymmetricRoleMaker",
    "PaddleCloudRoleMaker",
    "Role",
    "RoleKind",
    "RoleMaker",
    "UserDefinedCollectiveRoleMaker",
    "UserDefinedRoleMaker",
    "share_of_files",
]
