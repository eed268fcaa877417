"""Role makers: from the environment, or from arguments, to this replica's role in the job.

Pure: a mapping in, a frozen `Role` out, or a `RoleError` that names the variable, its value and what was
expected. ``Role.WORKER`` and ``Role.SERVER`` are the kinds, as in the original.
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
