"""What the processes of one mpirun do before they have roles: they learn each other's addresses."""
