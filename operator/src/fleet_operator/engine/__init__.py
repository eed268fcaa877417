"""What keeps looking: the queue, the workers and the reconciler that carries plans out."""
